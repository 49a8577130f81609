// The list of trajectories: only the rows that can be seen exist.

const ROW = 58; // CSS pixels, as in view.css

const list = { rows: [], chosen: null, choose: null };

function makeList(choose) {
  list.choose = choose;
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
  byId("list").addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const focus = () => byId("list").querySelector('[aria-current="true"]')?.focus({ preventScroll: true });
    choose(neighbour(by)).then(focus);
  });
  new ResizeObserver(drawRows).observe(byId("list"));
}

function showRows(rows) {
  list.rows = rows;
  drawRows();
}

function drawRows() {
  const box = byId("list");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
  const last = Math.min(list.rows.length, first + Math.ceil(box.clientHeight / ROW) + 8);
  const focused = box.contains(document.activeElement) && document.activeElement.dataset.at;
  const space = el("div", { class: "space" });
  space.style.height = `${list.rows.length * ROW}px`;
  for (let i = first; i < last; i++) {
    const made = rowOf(list.rows[i]);
    made.style.top = `${i * ROW}px`;
    space.append(made);
  }
  put(box, space);
  for (const canvas of space.querySelectorAll("canvas")) thumb(canvas, canvas.dataset.hash);
  if (focused) box.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
}

function rowOf(row) {
  const chosen = row === list.chosen;
  const shown = row.picture
    ? el("canvas", { width: 2 * THUMB, height: 2 * THUMB, "data-hash": row.picture, "aria-hidden": "true" })
    : el("span", { class: "nothing", "aria-hidden": "true" });
  const first = el(
    "span",
    { class: "line" },
    el("span", { class: row.solved ? "dot good" : "dot bad", title: words(row.status) }),
    el("span", { class: "name" }, row.task),
    row.member && el("span", { class: "dim" }, `#${row.member}`),
    row.label && el("span", { class: "label" }, row.label),
    el("span", { class: "num" }, signed(row.reward)),
  );
  const length = `${row.turns} × ${Math.round(row.tokens / Math.max(1, row.turns))}`;
  const second = el(
    "span",
    { class: "line dim" },
    el("span", { class: "num" }, `${words(row.phase)} ${row.step}`),
    el("span", { class: "snippet" }, row.error ?? row.snippet ?? ""),
    el("span", { class: "num", title: "turns × sampled tokens of a turn" }, length),
  );
  const given = { type: "button", class: "row", tabindex: chosen ? 0 : -1, "data-at": row.at };
  const more = { "aria-current": chosen && "true", on: { click: () => list.choose(row) } };
  return el("button", { ...given, ...more }, shown, first, second);
}

function scrollToRow(row) {
  const place = list.rows.indexOf(row);
  const box = byId("list");
  if (place < 0) return;
  if (place * ROW < box.scrollTop) box.scrollTop = place * ROW;
  else if ((place + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (place + 1) * ROW - box.clientHeight;
}

// The row before or after the chosen one.
function neighbour(by) {
  const place = list.rows.indexOf(list.chosen);
  return list.rows[place < 0 ? 0 : Math.max(0, Math.min(list.rows.length - 1, place + by))];
}
