// Elements, numbers and times. Data reaches the page as text nodes and attributes only, never as markup.

function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, work] of Object.entries(value)) made.addEventListener(event, work);
    } else {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  put(made, children);
  return made;
}

const byId = (id) => document.getElementById(id);

// Nested lists of elements and texts; what is not there is left out.
function put(parent, ...children) {
  const given = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  parent.replaceChildren(...given);
}

// At most four digits that mean something; a real minus sign, so that columns of numbers stand well.
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

const signed = (value) => (value > 0 ? `+${short(value)}` : short(value));

const counted = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

// Words of the records, e.g. context_full, as words of English.
const words = (name) => String(name ?? "").replaceAll("_", " ");

function visible(text) {
  return JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣");
}

const later = (ms) => new Promise((done) => setTimeout(done, ms));
