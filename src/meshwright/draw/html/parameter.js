// A parameter: its rectangle, true to scale along each dim, cut as the axes cut it; each box in the colour of who holds it.

const drawing = { row: -1, variant: -1, holders: [], boxes: [] };

/** The dims that are drawn: the first, and one that is cut, else the next. */
function drawnDims(row) {
  if (!row.shape.length) return [];
  const cut = row.tp && row.tp[0] ? [row.tp[0]] : [];
  return [0, ...cut, ...row.shape.map((_, dim) => dim).slice(1)].slice(0, row.shape.length > 1 ? 2 : 1);
}

/** What is drawn of the chosen parameter: its slices with their ranks, and a box for each range of each drawn dim. */
function prepared() {
  const row = facts.rows[chosen.row];
  if (drawing.row === chosen.row && drawing.variant === chosen.variant) return drawing;
  const variant = row.variants[chosen.variant] ?? row.variants[0];
  const dims = drawnDims(row);
  const held = holders(row, variant.stages);
  const boxes = held.flatMap((holder, index) => {
    if (!elementsOf(holder.slices)) return [];
    const down = dims.length ? holder.slices[dims[0]] : [[0, 1]];
    const across = dims.length > 1 ? holder.slices[dims[1]] : [[0, 1]];
    return down.flatMap((rows) => across.map((columns) => ({ holder: index, rows, columns })));
  });
  const one = row.shape.length === 1; // a vector lies down
  const turned = one ? boxes.map(({ holder, rows }) => ({ holder, rows: [0, 1], columns: rows })) : boxes;
  const size = dims.map((dim) => row.shape[dim]);
  const extent = one ? [1, size[0]] : [size[0] ?? 1, size[1] ?? 1];
  return Object.assign(drawing, { row: chosen.row, variant: chosen.variant, facts: row, stages: variant.stages, dims, holders: held, boxes: turned, extent });
}

/** A hue for each tp rank, lighter and darker by shard; where one axis alone cuts, a hue for each of its ranks. */
function holderColour(row, holder) {
  const back = css("panel");
  const tp = row.tp ? row.tp[1][0].length : 1;
  if (tp > 1 && row.shards === 1) return css(`hue-${holder.tp % HUES}`);
  if (tp === 1 && row.shards <= HUES) return css(`hue-${row.shards > 1 ? holder.shard : 0}`);
  const hue = css(`hue-${tp > 1 ? holder.tp % HUES : 0}`);
  const share = row.shards > 1 ? holder.shard / (row.shards - 1) : 0;
  const stripe = row.shards > 8 && holder.shard % 2 ? 0.12 : 0;
  return mixed(hue, back, Math.min(0.78, 0.62 * share + stripe));
}

const MARGIN = { left: 58, top: 24, right: 8, bottom: 20 };

function frame(width) {
  const [rows, columns] = drawing.extent;
  const wide = width - MARGIN.left - MARGIN.right;
  const flat = drawing.facts.shape.length < 2;
  const ratio = flat ? 0.12 : Math.max(0.42, Math.min(1.05, rows / columns));
  const high = Math.max(flat ? 56 : 150, Math.min(440, wide * ratio));
  const narrow = !flat && rows / columns > 1.05 ? Math.max(wide * 0.55, high / Math.min(3, rows / columns)) : wide;
  const across = Math.min(wide, narrow);
  return { x: MARGIN.left, y: MARGIN.top, wide: across, high, sx: across / columns, sy: high / rows };
}

function drawParameter(context, width, height, pointed) {
  const { boxes, holders: held, facts: row, dims } = prepared();
  const place = (drawing.place = frame(width));
  const mine = held.findIndex((holder) => holder.ranks.includes(chosen.rank));
  boxes.forEach((box) => {
    const [x, y, w, h] = boxPlace(place, box);
    const full = holderColour(row, held[box.holder]);
    const colour = pointed !== null && box.holder !== pointed.holder ? mixed(full, css("panel"), 0.45) : full;
    context.fillStyle = colour;
    const gap = w > 5 && h > 5 ? 0.75 : w > 2.5 && h > 2.5 ? 0.25 : 0;
    context.fillRect(x + gap, y + gap, Math.max(0.5, w - 2 * gap), Math.max(0.5, h - 2 * gap));
    if (w > 30 && h > 13) write(context, ranksText(held[box.holder].ranks, 4), x + w / 2, y + h / 2, { colour: inkOn(colour), align: "center", most: w - 6 });
  });
  for (const [index, colour, line] of [[mine, css("ink"), 2], [pointed?.holder ?? -1, css("accent"), 2.5]]) {
    boxes.filter((box) => box.holder === index).forEach((box) => {
      const [x, y, w, h] = boxPlace(place, box);
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(x + line / 2, y + line / 2, Math.max(1, w - line), Math.max(1, h - line));
    });
  }
  rulers(context, place, row, dims);
}

function boxPlace(place, { rows, columns }) {
  return [place.x + columns[0] * place.sx, place.y + rows[0] * place.sy, (columns[1] - columns[0]) * place.sx, (rows[1] - rows[0]) * place.sy];
}

/** Where the dims are cut, and the fused blocks of the dim that has several. */
function rulers(context, place, row, dims) {
  const colour = css("muted");
  const flat = row.shape.length < 2;
  const along = (dim, across) => {
    const cuts = [...new Set(drawing.boxes.flatMap((box) => (across ? box.columns : box.rows)))].sort((a, b) => a - b);
    let last = -Infinity;
    for (const cut of cuts) {
      const at = across ? place.x + cut * place.sx : place.y + cut * place.sy;
      if (at - last < (across ? 34 : 15) && cut !== cuts.at(-1)) continue;
      if (cut === cuts.at(-1) && at - last < (across ? 34 : 12)) continue;
      last = at;
      if (across) write(context, `${cut}`, at, place.y - 9, { colour, align: cut ? (cut === cuts.at(-1) ? "right" : "center") : "left", size: 10 });
      else write(context, `${cut}`, place.x - 7, Math.min(place.y + place.high - 5, Math.max(place.y + 5, at)), { colour, align: "right", size: 10 });
    }
    const blocks = row.tp && row.tp[0] === dim && row.tp[1].length > 1 ? row.tp[1].map((piece) => piece.reduce((a, b) => a + b, 0)) : [];
    let base = 0;
    context.strokeStyle = css("ink");
    context.lineWidth = 2;
    for (const block of blocks.slice(0, -1)) {
      base += block;
      context.beginPath();
      if (across) context.moveTo(place.x + base * place.sx, place.y - 4), context.lineTo(place.x + base * place.sx, place.y + place.high + 4);
      else context.moveTo(place.x - 4, place.y + base * place.sy), context.lineTo(place.x + place.wide + 4, place.y + base * place.sy);
      context.stroke();
    }
  };
  if (flat) along(0, true);
  else {
    along(dims[0], false);
    along(dims[1], true);
  }
  const [down, across] = flat ? ["", "elements"] : dims.map((dim) => dimText(dim, row.shape.length).replace(":", ""));
  write(context, `${across} →`, place.x, place.y + place.high + 12, { colour, size: 10 });
  if (!flat) {
    context.save();
    context.translate(9, place.y + place.high / 2);
    context.rotate(-Math.PI / 2);
    write(context, `← ${down}`, 0, 0, { colour, align: "center", size: 10 });
    context.restore();
  }
}

function boxUnder(x, y) {
  const { place, boxes } = drawing;
  if (!place) return null;
  const [column, row] = [(x - place.x) / place.sx, (y - place.y) / place.sy];
  return boxes.find((box) => row >= box.rows[0] && row < box.rows[1] && column >= box.columns[0] && column < box.columns[1]) ?? null;
}

/** "rows 0–63 of 256, columns all, 32 KiB, ranks 3, 7" */
function holderText(row, holder) {
  return `${slicesText(holder.slices, row.shape)}, ${sizeText(elementsOf(holder.slices) * row.item)}, ${rankWord(holder.ranks)}`;
}

function boxStep(box, key) {
  const { boxes, place } = drawing;
  if (!boxes.length) return null;
  if (box === null) return boxes.find((one) => drawing.holders[one.holder].ranks.includes(chosen.rank)) ?? boxes[0];
  const [x, y, w, h] = boxPlace(place, box);
  const beyond = { left: [x - 1, y + h / 2], right: [x + w + 1, y + h / 2], up: [x + w / 2, y - 1], down: [x + w / 2, y + h + 1] }[key];
  return boxUnder(...beyond) ?? box;
}

const parameterPicture = picture("The chosen parameter, cut as the axes cut it. Arrow keys move from box to box.", {
  height: (width) => (prepared(), frame(width).high + MARGIN.top + MARGIN.bottom),
  draw: drawParameter,
  hit: boxUnder,
  say: (box) => {
    const { facts: row, holders: held } = drawing;
    const holder = held[box.holder];
    const at = [row.shards > 1 ? `dp_shard ${holder.shard}` : "", row.tp ? `tp ${holder.tp}` : ""].filter(Boolean).join(" · ");
    return [holderText(row, holder), at].filter(Boolean);
  },
  where: (box) => {
    const [x, y, w, h] = boxPlace(drawing.place, box);
    return { x: x + w / 2, y: y + h / 2 };
  },
  step: boxStep,
  choose: (box) => chooseRank(drawing.holders[box.holder].ranks[0]),
});

function parameterPanel() {
  const row = facts.rows[chosen.row];
  const variant = row.variants[chosen.variant] ?? row.variants[0];
  const several = row.variants.length > 1
    ? el("label", { class: "field" }, "stage ", el("select", {
        onchange: (event) => { chosen.variant = Number(event.target.value); redraw(); },
      }, row.variants.map((one, i) => el("option", { value: i, selected: i === chosen.variant }, `${one.stages.join(", ")}: ${one.label}`))))
    : null;
  const cut = Object.entries(row.layouts).filter(([axis, text]) => axis !== "pp" && text !== "Replicate" && sizeOf(axis) * row.shards > 1);
  const how = cut.map(([axis, text]) => el("span", { class: "cut", style: `--axis:${axisColour(axis)}`, text: `${axis}: ${text}` }));
  const lines = [
    [shapeText(row.shape), row.dtype, sizeText(bytesOf(row)), row.count > 1 ? `${row.count} alike` : "", row.trained ? "" : "frozen"].filter(Boolean).join(" · "),
    row.reason ? `why: ${row.reason}` : "",
    row.unit ? `gathered with ${row.unit}` : "",
    row.aliases.length ? `the same tensor: ${row.aliases.join(", ")}` : "",
  ].filter(Boolean);
  return [
    el("h3", { class: "name", text: row.variants.length > 1 ? variant.label : row.label }),
    several,
    el("p", { class: "cuts" }, how.length ? how : el("span", { class: "muted", text: "replicated on every rank that uses it" })),
    el("ul", { class: "facts" }, lines.map((line) => el("li", { text: line }))),
  ].filter(Boolean);
}

function mineText() {
  const { facts: row, holders: held } = prepared();
  const mine = held.find((holder) => holder.ranks.includes(chosen.rank));
  if (!mine || !elementsOf(mine.slices)) return `Rank ${chosen.rank} holds nothing of it.`;
  const others = mine.ranks.filter((rank) => rank !== chosen.rank);
  const alike = others.length ? ` ${others.length > 1 ? "Ranks" : "Rank"} ${ranksText(others)} ${others.length > 1 ? "hold" : "holds"} the same.` : "";
  return `Rank ${chosen.rank} holds ${slicesText(mine.slices, row.shape)}: ${sizeText(elementsOf(mine.slices) * row.item)}.${alike}`;
}

function holdersTable() {
  const { facts: row, holders: held } = prepared();
  const rows = held.slice(0, 128).map((holder) => [ranksText(holder.ranks, 16), slicesText(holder.slices, row.shape), sizeText(elementsOf(holder.slices) * row.item)]);
  if (held.length > 128) rows.push([`and ${held.length - 128} more slices`, "", ""]);
  return table(`Every slice of ${row.label}`, ["ranks", "slice", "bytes"], rows, [2]);
}

if (!facts.rows.length) byId("parameter").replaceChildren(el("p", { class: "muted", text: "The model has no parameters." }));
else byId("parameter-picture").append(parameterPicture);
views.push(() => {
  if (!facts.rows.length) return;
  byId("parameter-facts").replaceChildren(...parameterPanel());
  parameterPicture.paint();
  byId("parameter-mine").textContent = mineText();
  byId("parameter-table").replaceChildren(tableBehind(`Every slice and its ranks, as a table (${plural(drawing.holders.length, "distinct slice")})`, holdersTable));
});
