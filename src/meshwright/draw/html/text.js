// Numbers, slices and ranks as text.

function sizeText(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return unit === "B" ? `${Math.round(bytes)} B` : `${trimmed(bytes, 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${trimmed(bytes, 1)} TiB`;
}

const trimmed = (number, digits) => number.toFixed(digits).replace(/\.0+$/, "");

function countText(count) {
  for (const unit of ["", " k", " M", " G"]) {
    if (count < 1000) return `${+count.toPrecision(3)}${unit}`;
    count /= 1000;
  }
  return `${+count.toPrecision(3)} T`;
}

function secondsText(seconds) {
  if (seconds >= 1) return `${+seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  return `${+(seconds * 1e6).toPrecision(3)} µs`;
}

const percentText = (share) => `${share && share < 0.01 ? "< 1" : Math.round(100 * share)} %`;
const plural = (count, word, many = `${word}s`) => `${count.toLocaleString("en")} ${count === 1 ? word : many}`;

/** Ranks as "0, 4"; many of them as "0–7" or "0, 8 … 120 (16 ranks)". */
function ranksText(ranks, most = 8) {
  const last = ranks.length - 1;
  if (ranks.length > 2 && ranks[last] - ranks[0] === last) return `${ranks[0]}–${ranks[last]}`;
  if (ranks.length > most) return `${ranks[0]}, ${ranks[1]} … ${ranks[last]} (${ranks.length} ranks)`;
  return ranks.join(", ");
}

const rankWord = (ranks) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranksText(ranks)}`;

function dimText(dim, dims) {
  if (dims === 1) return "elements";
  return dims === 2 ? ["rows", "columns"][dim] : `dim ${dim}:`;
}

/** Ranges with both ends inside: "0–63", "0–31 and 96–127". */
function rangesText(ranges, most = 4) {
  const said = ranges.slice(0, most).map(([start, stop]) => (stop - start === 1 ? `${start}` : `${start}–${stop - 1}`));
  if (ranges.length > most) return `${said.join(", ")} … ${ranges.at(-1)[1] - 1}`;
  return said.length > 1 ? `${said.slice(0, -1).join(", ")} and ${said.at(-1)}` : said.join("");
}

/** "rows 0–63 of 256, columns all"; "nothing" of a slice without elements. */
function slicesText(slices, shape) {
  if (!shape.length) return "the one number";
  if (!elementsOf(slices)) return "nothing";
  return slices
    .map((ranges, dim) => {
      const whole = ranges.length === 1 && ranges[0][0] === 0 && ranges[0][1] === shape[dim];
      return `${dimText(dim, shape.length)} ${whole ? "all" : `${rangesText(ranges)} of ${shape[dim]}`}`;
    })
    .join(", ");
}

/** The same in short: what is cut, and without the sizes. */
function briefText(slices, shape) {
  if (!elementsOf(slices)) return "nothing";
  const cut = slices.map((ranges, dim) => [ranges, dim]).filter(([ranges, dim]) => lengthOf(ranges) !== shape[dim]);
  return cut.map(([ranges, dim]) => `${shape.length > 1 ? `${dimText(dim, shape.length)} ` : ""}${rangesText(ranges, 3)}`).join(", ") || "all";
}

const shapeText = (shape) => (shape.length ? shape.join(" × ") : "a number");
