// What tokens are coloured by, on demand; the numbers behind it appear where the pointer is.

const at = (turn, name, i) => turn.values[name]?.[i] ?? null;

function gapOf(turn, i) {
  const engine = at(turn, "logprobs", i);
  const learner = at(turn, "learner_logprobs", i);
  return engine === null || learner === null ? null : learner - engine;
}

const isTrained = (turn) => turn.advantage !== null || turn.values.advantages !== undefined;

const rgb = ([r, g, b], strength) => `rgb(${r} ${g} ${b} / ${(0.06 + 0.7 * strength).toFixed(3)})`;
const BLUE = [51, 122, 235];
const ORANGE = [235, 118, 30];
const VIOLET = [132, 82, 214];
const RED = [222, 53, 76];
const TEAL = [16, 152, 142];
const HUES = [BLUE, ORANGE, [28, 160, 92], [190, 70, 190], [190, 150, 20], TEAL, RED];

const range = (from, to) => [short(from), short(to)];
const most = (values) => values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0) || 1e-12;

// value(turn, i): a number or null. scale(values): {colour(value), ends, stops} of all values that are shown.
const MODES = {
  none: { name: "nothing" },
  mask: {
    name: "loss mask",
    value: (turn) => (isTrained(turn) ? 1 : 0),
    scale: () => ({
      colour: (value) => rgb(value ? TEAL : ORANGE, value ? 0.45 : 0.25),
      chips: [["trained", rgb(TEAL, 0.45)], ["sampled, not trained", rgb(ORANGE, 0.25)], ["context", "transparent"]],
    }),
  },
  advantage: {
    name: "advantage",
    value: (turn, i) => at(turn, "advantages", i) ?? turn.advantage,
    scale: (values) => {
      const top = most(values);
      const colour = (value) => rgb(value < 0 ? ORANGE : BLUE, Math.abs(value) / top);
      return { colour, ends: range(-top, top), stops: [-top, -top / 2, 0, top / 2, top].map(colour) };
    },
  },
  logprob: {
    name: "log-probability",
    value: (turn, i) => at(turn, "logprobs", i),
    scale: (values) => {
      const low = -Math.max(1, Math.min(8, most(values)));
      const colour = (value) => rgb(VIOLET, Math.min(1, value / low));
      return { colour, ends: range(low, 0), stops: [low, low / 2, 0].map(colour) };
    },
  },
  gap: {
    name: "learner–engine gap",
    value: gapOf,
    scale: (values) => {
      const top = most(values);
      const colour = (value) => rgb(value < 0 ? RED : VIOLET, Math.abs(value) / top);
      return { colour, ends: range(-top, top), stops: [-top, -top / 2, 0, top / 2, top].map(colour) };
    },
  },
  entropy: {
    name: "entropy",
    value: (turn, i) => at(turn, "entropy", i),
    scale: (values) => {
      const top = most(values);
      const colour = (value) => rgb(TEAL, value / top);
      return { colour, ends: range(0, top), stops: [0, top / 2, top].map(colour) };
    },
  },
  version: {
    name: "weight version",
    value: (turn, i) => at(turn, "weight_versions", i),
    scale: (values) => {
      const known = [...new Set(values)].sort((a, b) => a - b);
      const colour = (value) => rgb(HUES[known.indexOf(value) % HUES.length], 0.45);
      return { colour, chips: known.map((value) => [String(value), colour(value)]) };
    },
  },
};

let mode = "none";

// Spans of tokens that are shown: {turn, spans} for what was sampled, {ids, spans} for what stood there.
let tokenRuns = [];
const runOf = new WeakMap();

function tokenRun(box, found) {
  tokenRuns.push(found);
  runOf.set(box, found);
}

function recolour() {
  tokenRuns = tokenRuns.filter(({ spans }) => spans.length && spans[0].isConnected);
  document.documentElement.dataset.colour = mode;
  const { value, scale } = MODES[mode];
  const coloured = [];
  for (const { turn, spans } of tokenRuns) {
    spans.forEach((span, i) => {
      const found = turn && value ? value(turn, i) : null;
      if (found === null || found === undefined) span.style.backgroundColor = "";
      else coloured.push([span, found]);
    });
  }
  if (!scale) return put(byId("legend"));
  if (!coloured.length) return put(byId("legend"), el("span", { class: "dim" }, "not recorded for these tokens"));
  const made = scale(coloured.map(([, found]) => found));
  for (const [span, found] of coloured) span.style.backgroundColor = made.colour(found);
  put(byId("legend"), legend(made));
}

function legend({ chips, ends, stops }) {
  if (chips) {
    return chips.slice(0, 8).map(([name, colour]) => {
      const chip = el("span", { class: "swatch" }, name);
      chip.style.backgroundColor = colour;
      return chip;
    });
  }
  const bar = el("span", { class: "scale" });
  bar.style.backgroundImage = `linear-gradient(90deg, ${stops.join(", ")})`;
  return [el("span", { class: "num" }, ends[0]), bar, el("span", { class: "num" }, ends[1])];
}

function facts(found, i) {
  const { turn } = found;
  const id = found.ids[i];
  const list = [["id", String(id)]];
  if (!turn) return [...list, ["", "context, not trained"]];
  list.push(["", isTrained(turn) ? "sampled, trained" : "sampled, not trained"]);
  const logprob = at(turn, "logprobs", i);
  if (logprob !== null) list.push(["log-probability", `${short(logprob)}  (p ${short(Math.exp(logprob))})`]);
  const others = [["learner's", "learner_logprobs"], ["entropy", "entropy"], ["version", "weight_versions"]];
  for (const [name, key] of others) {
    if (at(turn, key, i) !== null) list.push([name, short(at(turn, key, i))]);
  }
  const gap = gapOf(turn, i);
  if (gap !== null) list.push(["gap", signed(gap)]);
  const advantage = MODES.advantage.value(turn, i);
  if (advantage !== null) list.push(["advantage", signed(advantage)]);
  return list;
}

function showTip(event) {
  const span = event.target.closest?.(".t");
  const found = span && runOf.get(span.parentElement);
  const tip = byId("tip");
  if (!found) return void (tip.hidden = true);
  const lines = facts(found, found.spans.indexOf(span));
  put(
    tip,
    el("b", {}, visible(span.dataset.piece ?? span.textContent)),
    el("dl", {}, lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
  );
  tip.hidden = false;
  const { left, bottom, top } = span.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const below = bottom + 6 + height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? bottom + 6 : Math.max(4, top - height - 6)}px`;
}
