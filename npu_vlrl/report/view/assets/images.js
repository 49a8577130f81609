// Images at the resolution that the model saw. They are decoded when they come into view.

const LARGEST = 4; // times that the pixels of a small image are enlarged
const COMFORTABLE = 240; // CSS pixels up to which they are

const waiting = new Map();
const sight = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      const draw = waiting.get(target);
      waiting.delete(target);
      draw?.();
    }
  },
  { rootMargin: "120px" },
);

function whenSeen(target, work) {
  waiting.set(target, work);
  sight.observe(target);
}

// Elements that left the page are not waited for any more.
function forgetUnseen() {
  for (const target of waiting.keys()) {
    if (target.isConnected) continue;
    sight.unobserve(target);
    waiting.delete(target);
  }
}

async function draw(canvas, hash, width, height) {
  const blob = await source.image(hash).catch(() => null);
  const size = { resizeWidth: width, resizeHeight: height, resizeQuality: "high" };
  const bitmap = blob && (await createImageBitmap(blob, size).catch(() => null));
  if (!bitmap) {
    canvas.replaceWith(missing(hash, width, height));
    return;
  }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  canvas.dataset.drawn = "";
  bitmap.close();
}

function missing(hash, width, height) {
  const box = el("span", { class: "missing" }, "image not in the run folder", el("br"), hash.slice(0, 12));
  if (width) box.style.aspectRatio = `${width} / ${height}`;
  return box;
}

// An image of a record: a button that shows the file at its full size, and what the model made of it.
function imageBox(image) {
  const [width, height] = image.seen ?? image.stored ?? [0, 0];
  const facts = [
    image.seen && `${width}×${height} seen`,
    image.tokens && counted(image.tokens, "token"),
    image.stored && `${image.stored[0]}×${image.stored[1]} stored`,
  ].filter(Boolean);
  if (!image.stored) {
    return el("span", { class: "image" }, missing(image.hash, width, height), el("small", {}, facts.join(" · ")));
  }
  const times = Math.max(1, Math.min(LARGEST, Math.floor(COMFORTABLE / Math.max(width, height))));
  const canvas = el("canvas", { width, height, role: "img", "aria-label": `image ${image.hash.slice(0, 12)}` });
  canvas.style.width = `${width * times}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  if (times > 1) facts.push(`drawn ${times}×`);
  canvas.classList.toggle("enlarged", times > 1);
  whenSeen(canvas, () => draw(canvas, image.hash, width, height));
  const open = el(
    "button",
    { type: "button", class: "open", title: "Show the stored image", on: { click: () => showFull(image) } },
    canvas,
  );
  return el("span", { class: "image" }, open, el("small", {}, facts.join(" · ")));
}

async function showFull(image) {
  const blob = await source.image(image.hash);
  if (!blob) return;
  const address = URL.createObjectURL(blob);
  const [width, height] = image.stored;
  const shown = el("img", { alt: `image ${image.hash.slice(0, 12)}`, width, height });
  shown.src = address;
  const close = el("button", { type: "button", on: { click: () => byId("full").close() } }, "Close");
  const facts = el("span", { class: "dim" }, `${width}×${height} · ${image.hash}`);
  put(byId("full"), shown, el("footer", {}, facts, close));
  byId("full").addEventListener("close", () => URL.revokeObjectURL(address), { once: true });
  byId("full").showModal();
}

// Small ones for the list.
const THUMB = 40;
const thumbs = new Map();

async function thumb(canvas, hash) {
  if (!thumbs.has(hash)) {
    if (thumbs.size > 300) thumbs.delete(thumbs.keys().next().value);
    thumbs.set(hash, small(hash).catch(() => null));
  }
  const bitmap = await thumbs.get(hash);
  if (bitmap && canvas.isConnected) canvas.getContext("2d").drawImage(bitmap, 0, 0);
}

async function small(hash) {
  const blob = await source.image(hash);
  const whole = blob && (await createImageBitmap(blob));
  if (!whole) return null;
  const side = Math.min(whole.width, whole.height);
  const size = { resizeWidth: 2 * THUMB, resizeHeight: 2 * THUMB, resizeQuality: "medium" };
  const cut = await createImageBitmap(whole, (whole.width - side) / 2, (whole.height - side) / 2, side, side, size);
  whole.close();
  return cut;
}
