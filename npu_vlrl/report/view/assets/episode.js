// One trajectory, turn by turn and role by role; or a group of them, side by side.

const mark = (solved) => el("span", { class: solved ? "good" : "bad" }, solved ? "solved" : "not solved");
const fact = (name, ...value) => el("span", { class: "fact" }, el("span", { class: "dim" }, `${name} `), ...value);

// Tokens of a block as spans; a number stands for an image. Control tokens are quiet until tokens are coloured.
function tokensOf(pieces, ids, images, turn) {
  const box = el("div", { class: "tokens" });
  const spans = [];
  const kept = [];
  const values = [];
  pieces.forEach((piece, i) => {
    if (typeof piece === "number") {
      box.append(imageBox(images[piece]));
      return;
    }
    const control = run.control.has(ids[i]);
    const span = el("span", { class: control ? "t control" : "t" }, piece);
    // a line break is wide enough to be seen once tokens are coloured
    if (!piece || !piece.trim()) span.dataset.piece = piece;
    box.append(span);
    spans.push(span);
    kept.push(ids[i]);
    values.push(i);
  });
  tokenRun(box, { turn, ids: kept, spans });
  return box;
}

// The tokens that open a message, `<|im_start|>user\n`, are what its label says.
function headLength({ role, pieces }) {
  if (role === null || !pieces) return 0;
  const end = pieces.findIndex((piece) => typeof piece === "string" && piece.includes("\n"));
  return end < 0 ? pieces.length : end + 1;
}

function message(block, rest = []) {
  const label = block.role === null ? "" : block.role;
  const kind = ["system", "user", "assistant", "tool"].includes(label) ? label : "other";
  if (!block.pieces) {
    const images = block.images.map(imageBox);
    const note = `${counted(block.ids.length, "token")}; their text needs the run's tokenizer`;
    return el(
      "div",
      { class: `message ${kind}` },
      el("span", { class: "role" }, label),
      el("div", { class: "body" }, el("p", { class: "dim" }, note), images),
    );
  }
  const cut = headLength(block);
  const head = tokensOf(block.pieces.slice(0, cut), block.ids.slice(0, cut), [], null);
  head.classList.add("opening");
  const body = tokensOf(block.pieces.slice(cut), block.ids.slice(cut), block.images, null);
  const quiet = (piece, i) => typeof piece === "string" && (run.control.has(block.ids[i]) || !piece.trim());
  const empty = block.pieces.every((piece, i) => i < cut || quiet(piece, i));
  // the template's line break
  if (body.lastChild?.dataset?.piece?.trim() === "") body.lastChild.classList.add("control");
  return el(
    "div",
    { class: `message ${kind}${block.role === null ? " tail" : ""}${empty ? " bare" : ""}` },
    el("span", { class: "role" }, label),
    el("div", { class: "body" }, head, body, rest),
  );
}

// Blocks of a context; the last one, which asks the policy to speak, goes before what it said.
function split(turn, segments) {
  const blocks = turn.context.flatMap((number) => segments[number]);
  const last = blocks.at(-1);
  const asks = last && last.pieces && headLength(last) === last.pieces.length;
  return asks ? [blocks.slice(0, -1), last] : [blocks, null];
}

function pretty(value) {
  return el("pre", {}, JSON.stringify(value, null, 2) ?? "");
}

function action(turn, k, asking, isLast) {
  const text = turn.pieces ? tokensOf(turn.pieces, turn.ids, [], turn) : el("div", { class: "tokens" }, turn.text);
  const opening = asking ? tokensOf(asking.pieces, asking.ids, [], null) : null;
  opening?.classList.add("opening");
  return el(
    "div",
    { class: "message assistant action" },
    el("span", { class: "role" }, "assistant", el("small", {}, `turn ${k + 1}`)),
    el("div", { class: "body" }, opening, text, outcome(turn), details(turn, isLast)),
  );
}

// What the turn earned, and why it ended.
function outcome(turn) {
  const { verdict } = turn;
  const terms = Object.entries(verdict?.terms ?? {}).map(([name, value]) =>
    fact(words(name) + (name in (verdict.checks ?? {}) ? " (weight 0)" : ""), el("span", { class: "num" }, signed(value))),
  );
  return el(
    "div",
    { class: "outcome" },
    el("span", { class: "reward num" }, fact("reward", signed(turn.reward))),
    terms.length ? el("span", { class: "terms" }, terms) : null,
    verdict ? mark(verdict.solved) : null,
    turn.advantage === null ? null : fact("advantage", el("span", { class: "num" }, signed(turn.advantage))),
    el("span", { class: turn.stop === "end_of_turn" ? "dim" : "bad" }, words(turn.stop)),
    el("span", { class: "dim" }, counted(turn.ids.length, "token")),
  );
}

function details(turn, isLast) {
  const parts = [];
  const { parsed } = turn;
  if (typeof turn.state === "string") parts.push(part("state", el("pre", {}, turn.state)));
  if (parsed) {
    const read = [...Object.entries(parsed.thoughts ?? {}), ["answer", parsed.answer]];
    const lines = read.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value ?? "none")]);
    parts.push(part(parsed.right ? "read as" : "read as, though the format is not right", el("dl", {}, lines)));
  }
  for (const [i, call] of (turn.tool_calls ?? []).entries()) {
    const result = turn.tool_results[i];
    const name = el("code", { class: "tool" }, call.name);
    parts.push(part("calls", name, Object.keys(call.arguments ?? {}).length ? pretty(call.arguments) : null));
    if (result) parts.push(resultOf(result, isLast));
  }
  for (const result of turn.tool_results.slice((turn.tool_calls ?? []).length)) parts.push(resultOf(result, isLast));
  if (turn.judge_error) parts.push(part("judge failed", el("p", { class: "bad" }, turn.judge_error)));
  // else the next message says it
  if (turn.feedback && (isLast || !turn.pieces)) parts.push(part("feedback", el("p", {}, turn.feedback)));
  return parts.length ? el("div", { class: "details" }, parts) : null;
}

// The model sees a result in its next turn; only the last one has to be shown here.
function resultOf(result, isLast) {
  const images = isLast ? result.images.map(imageBox) : [];
  const below = `${counted(result.images.length, "image")}, below`;
  const more = !isLast && result.images.length ? el("span", { class: "dim" }, below) : null;
  const name = result.error ? el("span", { class: "bad" }, "error") : "returns";
  return part(name, el("p", {}, result.text), images, more);
}

function part(name, ...content) {
  return el("div", { class: "part" }, el("span", { class: "dim" }, name), el("div", {}, content));
}

function turnsOf({ record, segments }, withOpening) {
  const { turns } = record;
  return turns.map((turn, k) => {
    const [before, asking] = split(turn, segments);
    const shown = k === 0 && !withOpening ? [] : before.map((found) => message(found));
    const news = "The template rewrote the history: from here the model saw this instead";
    const said = action(turn, k, asking, k === turns.length - 1);
    return el(
      "section",
      { class: "turn", "aria-label": `turn ${k + 1}` },
      turn.continues ? null : el("p", { class: "break" }, news),
      shown,
      said,
    );
  });
}

const answerOf = ({ answer }) =>
  answer === null || answer === undefined ? null : fact("answer", el("code", {}, answer));

const placeOf = (row, name) =>
  el("div", { class: "dim small" }, `${row.phase === "step" ? "training" : words(row.phase)} · step ${row.step} · ${name}`);

function summary(row, record) {
  const lines = [
    el("span", { class: row.status === "solved" ? "good" : "bad" }, words(row.status)),
    fact("reward", el("b", { class: "num" }, signed(row.reward))),
    answerOf(record),
    fact("source", row.source),
    fact("turns", String(row.turns)),
    fact("sampled", counted(row.tokens, "token")),
    row.label ? el("span", { class: "label" }, row.label) : null,
  ];
  return el(
    "header",
    { class: "summary" },
    el("h2", {}, row.task, row.member ? el("span", { class: "dim" }, ` · member ${row.member}`) : null),
    el("div", { class: "facts" }, lines),
    placeOf(row, row.id),
    row.error ? el("p", { class: "error" }, row.error) : null,
    row.turns ? null : el("p", { class: "dim" }, "It has no turns."),
  );
}

function one(row, found) {
  return el("article", { class: "one" }, summary(row, found.record), turnsOf(found, true));
}

const openingOf = ({ record, segments }) => (record.turns.length ? split(record.turns[0], segments)[0] : []);

// What all members saw first stands once, above them.
function together(rows, founds, chosen, choose) {
  const openings = founds.map((found) => JSON.stringify(openingOf(found)));
  const same = openings.length > 0 && openings.every((opening) => opening === openings[0]);
  const columns = rows.map((row, i) =>
    el(
      "article",
      { class: row === chosen ? "column chosen" : "column" },
      el(
        "button",
        { type: "button", class: "member", "aria-current": row === chosen && "true", on: { click: () => choose(row) } },
        el("b", {}, row.label ?? `member ${row.member}`),
        row.label && el("span", { class: "dim" }, `#${row.member}`),
        el("span", { class: row.solved ? "good" : "bad" }, words(row.status)),
        el("span", { class: "num" }, signed(row.reward)),
      ),
      row.error ? el("p", { class: "error" }, row.error) : null,
      turnsOf(founds[i], !same),
    ),
  );
  return el(
    "div",
    { class: "together" },
    el(
      "header",
      { class: "summary" },
      el("h2", {}, chosen.task, el("span", { class: "dim" }, ` · ${counted(rows.length, "sibling")}`)),
      el("div", { class: "facts" }, answerOf(founds[0].record)),
      placeOf(chosen, chosen.group),
    ),
    same ? el("div", { class: "opening-all" }, openingOf(founds[0]).map((found) => message(found))) : null,
    el("div", { class: "columns" }, columns),
  );
}
