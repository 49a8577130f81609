// Puts the parts together: what is chosen, keys, themes, and a run that goes on.

const POLL_MS = 2000;

let sideBySide = false;
let shownAt = 0;

async function choose(row) {
  if (!row) return;
  list.chosen = row;
  drawRows();
  scrollToRow(row);
  location.replace(`#${encodeURIComponent(row.id)}`);
  const turn = ++shownAt;
  const rows = sideBySide ? run.rows.filter((other) => other.group === row.group) : [row];
  const founds = await Promise.all(rows.map((other) => episodeOf(other).catch(() => null)));
  if (turn !== shownAt) return;
  const stage = byId("stage");
  byId("tip").hidden = true;
  if (founds.includes(null)) {
    put(stage, el("p", { class: "empty" }, "The records of this trajectory could not be read."));
    return;
  }
  put(stage, sideBySide ? together(rows, founds, row, choose) : one(row, founds[0]));
  stage.scrollTop = 0;
  const columns = stage.querySelector(".columns");
  const own = columns?.querySelector(".chosen");
  if (own) columns.scrollLeft = own.offsetLeft + own.offsetWidth - columns.offsetLeft - columns.clientWidth;
  forgetUnseen();
  recolour();
}

function setSideBySide(on) {
  sideBySide = on;
  byId("group").setAttribute("aria-pressed", String(on));
  choose(list.chosen);
}

function setMode(name) {
  mode = name;
  byId("colour").value = name;
  recolour();
}

function nextMode(by) {
  const names = Object.keys(MODES);
  setMode(names[(names.indexOf(mode) + by + names.length) % names.length]);
}

function toggleTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
}

const KEYS = {
  j: ["next trajectory", () => choose(neighbour(1))],
  k: ["previous trajectory", () => choose(neighbour(-1))],
  g: ["siblings of the group side by side", () => setSideBySide(!sideBySide)],
  c: ["colour tokens by the next thing; C by the one before", () => nextMode(1)],
  C: [null, () => nextMode(-1)],
  "/": ["search", () => control("search").focus()],
  t: ["dark or light", toggleTheme],
  Escape: ["leave the search, the side by side view, the colours", leave],
  "?": ["these keys", showHelp],
};

function leave() {
  if (document.activeElement?.closest("#filters")) document.activeElement.blur();
  else if (sideBySide) setSideBySide(false);
  else setMode("none");
}

function showHelp() {
  const lines = Object.entries(KEYS)
    .filter(([, [text]]) => text)
    .map(([key, [text]]) => [el("dt", {}, el("kbd", {}, key === "Escape" ? "Esc" : key)), el("dd", {}, text)]);
  put(
    byId("help"),
    el("h2", {}, "Keys"),
    el("dl", {}, lines),
    el("p", { class: "dim" }, "The pointer on a token shows its numbers; a click on an image shows the stored file."),
    el("footer", {}, el("button", { type: "button", on: { click: () => byId("help").close() } }, "Close")),
  );
  byId("help").showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (typing && event.key !== "Escape") return;
  const work = KEYS[event.key]?.[1];
  if (!work) return;
  event.preventDefault();
  work();
}

function refresh() {
  chooseRows((rows, progress) => {
    showRows(rows);
    const all = counted(run.rows.length, "trajectory", "trajectories");
    const part = rows.length === run.rows.length ? all : `${rows.length.toLocaleString("en")} of ${all}`;
    byId("count").textContent = progress < 1 ? `${part}, searched ${Math.round(100 * progress)} %` : part;
    if (!list.chosen && rows.length) choose(rows.find((row) => row.id === wantedId()) ?? rows[0]);
  });
}

function wantedId() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

function tell() {
  const { model, notes, unreadable } = run.head;
  byId("about").textContent = model;
  const more = unreadable ? [`${counted(unreadable, "line")} of trajectories.jsonl could not be read.`] : [];
  byId("note").textContent = [...notes, ...more].join(" ");
}

async function poll() {
  for (;;) {
    await later(POLL_MS);
    try {
      const head = await source.head(run.rows.length, run.head.generation);
      const news = head.rows.length > 0 || head.generation !== run.head.generation;
      const anew = takeHead(head);
      tell();
      if (!news) continue;
      if (anew) {
        texts.clear();
        list.chosen = null;
      }
      refreshChoices();
      refresh();
    } catch {
      byId("note").textContent = "The server does not answer; what is shown stays as it is.";
    }
  }
}

async function begin() {
  put(byId("colour"), Object.entries(MODES).map(([value, { name }]) => el("option", { value }, name)));
  byId("colour").addEventListener("change", (event) => setMode(event.target.value));
  byId("group").addEventListener("click", () => setSideBySide(!sideBySide));
  byId("theme").addEventListener("click", toggleTheme);
  byId("keys").addEventListener("click", showHelp);
  document.addEventListener("keydown", onKey);
  byId("stage").addEventListener("mouseover", showTip);
  byId("stage").addEventListener("mouseleave", () => (byId("tip").hidden = true));
  byId("stage").addEventListener("scroll", () => (byId("tip").hidden = true), { passive: true });
  window.addEventListener("hashchange", () => {
    if (list.chosen?.id !== wantedId()) choose(run.rows.find((row) => row.id === wantedId()));
  });
  takeHead(await source.head(0, 0));
  tell();
  makeFilters(refresh);
  makeList(choose);
  if (!run.rows.length) put(byId("stage"), el("p", { class: "empty" }, "There are no trajectories yet."));
  refresh();
  document.documentElement.dataset.ready = "";
  if (source.served) poll();
}

function complain(error) {
  put(byId("stage"), el("p", { class: "empty bad" }, `The records could not be read: ${error.message}`));
}

begin().catch(complain);
