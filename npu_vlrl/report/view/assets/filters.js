// Which trajectories the list shows, and in which order.

const CHOICES = [
  ["phase", "Phase", (row) => [row.phase]],
  ["source", "Source", (row) => [row.source]],
  ["status", "Status", (row) => [row.status]],
  ["stop", "Stop reason", (row) => row.stops],
];

const ORDERS = {
  recorded: ["as recorded", (a, b) => a.at - b.at],
  newest: ["newest first", (a, b) => b.at - a.at],
  best: ["highest reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["lowest reward", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  longest: ["most tokens", (a, b) => b.tokens - a.tokens],
  turns: ["most turns", (a, b) => b.turns - a.turns],
  calls: ["most tool calls", (a, b) => b.calls - a.calls],
};

const control = (name) => byId("filters").elements.namedItem(name);

const SOLVED = [["", "Solved or not"], ["yes", "Solved"], ["first", "Solved at once"], ["no", "Not solved"]];

function field(name, title, label, given = {}) {
  return el("input", { name, type: "text", placeholder: title, "aria-label": label, ...given });
}

const number = (name, title) => field(name, title, name.replace("_", " "), { type: "number", step: "any" });

function choice(name, title, options) {
  return el("select", { name, "aria-label": title }, options.map(([value, text]) => el("option", { value }, text)));
}

function makeFilters(changed) {
  const orders = Object.entries(ORDERS).map(([value, [title]]) => [value, title]);
  put(
    byId("filters"),
    field("search", "Search all text  ( / )", "Search", { type: "search", class: "wide" }),
    field("task", "Task", "Task contains"),
    field("group", "Group", "Group contains"),
    CHOICES.map(([name, title]) => choice(name, title, [])),
    choice("solved", "Solved", SOLVED),
    choice("order", "Order", orders),
    el("span", { class: "pair" }, el("span", {}, "Step"), number("step_from", "from"), number("step_to", "to")),
    el("span", { class: "pair" }, el("span", {}, "Reward"), number("reward_from", "from"), number("reward_to", "to")),
    el("button", { type: "reset", class: "wide quiet", id: "reset" }, "Clear filters"),
  );
  byId("filters").addEventListener("input", changed);
  byId("filters").addEventListener("reset", () => setTimeout(changed));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  refreshChoices();
}

// The values that occur; the choice that was made stays.
function refreshChoices() {
  for (const [name, title, of] of CHOICES) {
    const counts = new Map();
    for (const value of run.rows.flatMap(of)) counts.set(value ?? "", (counts.get(value ?? "") ?? 0) + 1);
    const select = control(name);
    const before = select.value;
    const options = [...counts]
      .sort()
      .map(([value, count]) => el("option", { value: `=${value}` }, `${words(value) || "none"}  (${count})`));
    put(select, el("option", { value: "" }, `Any ${title.toLowerCase()}`), options);
    select.value = [...select.options].some((option) => option.value === before) ? before : "";
  }
}

function between(name) {
  const [from, to] = ["from", "to"].map((end) => control(`${name}_${end}`).value);
  const low = from === "" ? -Infinity : Number(from);
  const high = to === "" ? Infinity : Number(to);
  const any = from === "" && to === "";
  return (value) => any || (value !== null && value >= low && value <= high);
}

// A predicate of rows for all but the search.
function filterOf() {
  const chosen = CHOICES.map(([name, , of]) => [control(name).value, of]).filter(([value]) => value);
  const solved = control("solved").value;
  const [task, group] = ["task", "group"].map((name) => control(name).value.toLowerCase());
  const [step, reward] = [between("step"), between("reward")];
  return (row) =>
    step(row.step) &&
    reward(row.reward) &&
    (!solved || (solved === "first" ? row.first : row.solved === (solved === "yes"))) &&
    String(row.task).toLowerCase().includes(task) &&
    row.group.toLowerCase().includes(group) &&
    chosen.every(([value, of]) => of(row).some((found) => `=${found ?? ""}` === value));
}

let search = 0;

// Calls `found(rows, progress)` at once and, while texts are searched, again; progress is 1 at the end.
async function chooseRows(found) {
  const own = ++search;
  const wanted = control("search").value.trim().toLowerCase();
  const order = ORDERS[control("order").value][1];
  const rows = run.rows.filter(filterOf());
  if (!wanted) return found(rows.sort(order), 1);
  const matching = [];
  let told = performance.now();
  for (const [i, row] of rows.entries()) {
    if ((await textOf(row)).includes(wanted)) matching.push(row);
    if (own !== search) return;
    if (performance.now() - told > 80) {
      found([...matching].sort(order), i / rows.length);
      await later(0);
      told = performance.now();
    }
  }
  if (own === search) found(matching.sort(order), 1);
}
