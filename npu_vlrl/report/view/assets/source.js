// Where the records come from: blocks of this file, or the server that sent it.

const KEPT_PAGES = 12;

async function bytesOf(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function unpack(base64) {
  const bytes = await bytesOf(base64);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The text of a block, which may not be there yet while the file is still read.
async function block(id) {
  for (;;) {
    const found = byId(id);
    if (found && (found.nextElementSibling || document.readyState !== "loading")) return found.textContent;
    if (document.readyState !== "loading") return null;
    await later(15);
  }
}

const embedded = {
  served: false,
  head: async () => unpack(byId("index").textContent),
  page: async (number) => unpack(await block(`page-${number}`)),
  image: async (hash) => {
    const text = await block(`picture-${hash}`);
    return text === null ? null : new Blob([await bytesOf(text)]);
  },
};

async function ask(path, given) {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const answer = await fetch(`${path}?${new URLSearchParams({ ...given, token })}`);
  return answer.ok ? answer : null;
}

const served = {
  served: true,
  head: async (from, generation) => {
    const answer = await ask("/index", { from, generation });
    if (answer === null) throw new Error("The server does not know this page any more.");
    return answer.json();
  },
  page: async (number) => (await ask("/page", { number }))?.json(),
  image: async (hash) => (await ask("/picture", { hash }))?.blob() ?? null,
};

const source = byId("index") ? embedded : served;

// The list: an object for each trajectory, with its place in the file.
const run = { head: null, rows: [], control: new Set(), pages: new Map() };

function takeHead(head) {
  const anew = run.head === null || head.generation !== run.head.generation;
  if (anew) {
    run.rows = [];
    run.pages.clear();
  }
  run.head = head;
  run.control = new Set(head.control);
  for (const values of head.rows) {
    const row = { at: run.rows.length };
    head.columns.forEach((name, i) => (row[name] = values[i]));
    row.member = row.id.startsWith(`${row.group}/`) ? row.id.slice(row.group.length + 1) : "";
    run.rows.push(row);
  }
  head.rows = [];
  return anew;
}

// {record, segments} of a row; null when the file does not hold it.
async function episodeOf(row) {
  const number = Math.floor(row.at / run.head.page);
  const place = row.at % run.head.page;
  for (const fresh of [false, true]) {
    if (fresh || !run.pages.has(number)) {
      run.pages.delete(number);
      run.pages.set(number, source.page(number));
      if (run.pages.size > KEPT_PAGES) run.pages.delete(run.pages.keys().next().value);
    }
    const page = await run.pages.get(number);
    // a page that was the last one may have grown
    if (page && page.records.length > place) return { record: page.records[place], segments: page.segments };
    if (!source.served) return null;
  }
  return null;
}

// All that a person may search in a trajectory, in small letters.
const texts = new Map();

async function textOf(row) {
  if (!texts.has(row.at)) {
    const found = await episodeOf(row);
    texts.set(row.at, found ? searchable(found).toLowerCase() : "");
  }
  return texts.get(row.at);
}

function searchable({ record, segments }) {
  const parts = [record.id, record.task, record.data_source, record.answer, record.error, record.label];
  for (const turn of record.turns) {
    for (const number of turn.context) {
      for (const { pieces } of segments[number]) {
        if (pieces) parts.push(pieces.filter((piece) => typeof piece === "string").join(""));
      }
    }
    parts.push(turn.text, turn.feedback, turn.judge_error, turn.state);
    for (const call of turn.tool_calls ?? []) parts.push(call.name, JSON.stringify(call.arguments));
    for (const result of turn.tool_results) parts.push(result.text);
  }
  return parts.filter((part) => typeof part === "string").join("\n");
}
