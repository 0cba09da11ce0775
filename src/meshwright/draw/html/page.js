// What all views share: the chosen rank and parameter, elements, the tooltip, colours, and pictures on a canvas.

const chosen = { rank: 0, row: 0, variant: 0 };
const views = []; // functions that draw a view anew

function redraw() {
  for (const view of views) view();
}

function chooseRank(rank) {
  chosen.rank = Math.max(0, Math.min(world - 1, Math.round(rank) || 0));
  const row = facts.rows[chosen.row]; // none in a model without parameters
  const variant = row ? variantOf(row, chosen.rank) : -1;
  if (variant >= 0) chosen.variant = variant;
  redraw();
}

const byId = (id) => document.getElementById(id);

/** An element: tag, attributes (on… are listeners, text is its text), children. */
function el(tag, attributes = {}, ...children) {
  const space = ["svg", "path", "rect", "line", "text", "g", "circle"].includes(tag) ? "http://www.w3.org/2000/svg" : null;
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table of texts and elements; columns named in `numbers` are set to the right. */
function table(caption, titles, rows, numbers = []) {
  const cell = (tag, value, i) =>
    el(tag, { class: numbers.includes(i) ? "number" : null, scope: tag === "th" ? "col" : null }, value);
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "unseen", text: caption }),
      el("thead", {}, el("tr", {}, titles.map((title, i) => cell("th", title, i)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, i) => cell("td", value, i))))),
    ),
  );
}

/** A table that is made when it is opened: the same as its picture, in words. */
function tableBehind(summary, make) {
  const details = el("details", { class: "behind" }, el("summary", { text: summary }));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(make());
  });
  return details;
}

// --- colours ---------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const HUES = 8; // --hue-0 … in page.css

function rgb(colour) {
  const digits = colour.replace("#", "");
  const wide = digits.length === 3 ? [...digits].map((d) => d + d).join("") : digits;
  return [0, 2, 4].map((i) => parseInt(wide.slice(i, i + 2), 16));
}

/** A colour between two: share 0 is the first. */
function mixed(one, other, share) {
  const [a, b] = [rgb(one), rgb(other)];
  return `#${a.map((x, i) => Math.round(x + (b[i] - x) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Black or white, whichever is read better on a colour. */
function inkOn(colour) {
  const [r, g, b] = rgb(colour).map((c) => (c / 255 <= 0.04 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#14181f" : "#ffffff";
}

const AXES = { pp: "the other stages of the pipeline", dp_replicate: "the same weights, other rows of the batch",
  dp_shard: "other shards of the same weights, other rows of the batch", tp: "other slices of the same layers, the same rows" };
const axisColour = (axis) => css(`axis-${axis.replace("_", "-")}`) || css("muted");

const darkWanted = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (darkWanted.matches ? "dark" : "light");

/** All is drawn anew, in the colours of the theme. */
function themed() {
  byId("theme").setAttribute("aria-pressed", String(theme() === "dark"));
  document.dispatchEvent(new Event("themed"));
  redraw();
}

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  themed();
}

byId("theme").addEventListener("click", () => useTheme(theme() === "dark" ? "light" : "dark"));
darkWanted.addEventListener("change", themed);
let themeOnScreen = ""; // while a page is printed, which is light
addEventListener("beforeprint", () => {
  themeOnScreen = theme();
  useTheme("light");
});
addEventListener("afterprint", () => useTheme(themeOnScreen));

// --- tooltip ---------------------------------------------------------------------------------------------------------

const tip = byId("tip");

/** Shows lines at a place of the window; the first is bold. Screen readers hear them where `spoken`. */
function showTip(lines, x, y, spoken = false) {
  tip.replaceChildren(...lines.map((line, i) => el(i ? "div" : "strong", { text: line })));
  tip.hidden = false;
  tip.scrolled = scrollY;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + height + 22 > innerHeight ? Math.max(4, y - height - 12) : y + 16}px`;
  if (spoken) byId("spoken").textContent = lines.join(". ");
}

function hideTip() {
  tip.hidden = true;
}

addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", () => Math.abs(scrollY - tip.scrolled) > 40 && hideTip(), { passive: true });

// --- pictures --------------------------------------------------------------------------------------------------------

/**
 * A picture on a canvas, sharp on any screen.
 *
 * height(width): of the picture, in CSS pixels. draw(context, width, height, item): item is what is pointed at.
 * hit(x, y): the item there, or null. say(item): lines of its tooltip. where(item): {x, y} of its middle.
 * step(item, key): the item that an arrow key leads to; from null, the first. choose(item): a click, Enter or Space.
 */
function picture(label, { height, draw, hit, say, where, step, choose }) {
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "picture", "aria-label": label });
  let item = null;
  const paint = () => {
    const width = canvas.parentElement?.clientWidth ?? 0;
    if (!width) return;
    const high = height(width);
    const scale = Math.max(2, devicePixelRatio || 1);
    canvas.style.height = `${high}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(high * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = `11px ${css("sans")}`;
    context.textBaseline = "middle";
    draw(context, width, high, item);
  };
  const point = (next, x, y, spoken) => {
    if (next !== item) {
      item = next;
      paint();
    }
    canvas.style.cursor = item && choose ? "pointer" : "default";
    if (item === null) hideTip();
    else showTip(say(item), x, y, spoken);
  };
  canvas.addEventListener("pointermove", (event) => point(hit(event.offsetX, event.offsetY), event.clientX, event.clientY));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("blur", () => point(null));
  canvas.addEventListener("click", (event) => {
    const found = hit(event.offsetX, event.offsetY);
    if (found !== null && choose) choose(found);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) {
      event.preventDefault();
      const next = step(item, event.key.slice(5).toLowerCase());
      const { x, y } = where(next);
      const box = canvas.getBoundingClientRect();
      point(next, box.left + x, box.top + y, true);
    } else if ((event.key === "Enter" || event.key === " ") && item !== null && choose) {
      event.preventDefault();
      choose(item);
    }
  });
  new ResizeObserver(paint).observe(canvas.ownerDocument.body);
  canvas.paint = paint;
  canvas.at = where;
  return canvas;
}

/** Text in a picture, cut off where it is wider than its place; left out there, if it is to be `whole`. */
function write(context, text, x, y, { colour, align = "left", most = Infinity, bold = false, size = 11, whole = false } = {}) {
  context.font = `${bold ? "600 " : ""}${size}px ${css("sans")}`;
  context.textAlign = align;
  context.fillStyle = colour ?? css("ink");
  let said = text;
  while (!whole && said.length > 1 && context.measureText(said).width > most) said = `${said.slice(0, -2)}…`;
  if (context.measureText(said).width <= most) context.fillText(said, x, y);
}

function swatch(colour) {
  return el("span", { class: "swatch", style: `background:${colour}`, "aria-hidden": "true" });
}

function bar(share, colour) {
  return el("span", { class: "bar", "aria-hidden": "true" }, el("span", { style: `width:${share > 0 ? Math.max(1, 100 * share) : 0}%;background:${colour}` }));
}

function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([colour, text]) => el("li", {}, swatch(colour), text)));
}
