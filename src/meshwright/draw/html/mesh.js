// The mesh: every rank a cell; the chosen one, and who shares which axis with it.
//
// The last axis makes strips, the one before lays strips side by side, outer axes make bands of them:
//
//     pp 0   ▢▢▢▢ ▢▢▢▢ ▢▢▢▢     pp=2 × dp_shard=3 × tp=4
//     pp 1   ▢▢▢▢ ▢▢▢▢ ▢▢▢▢

const shownAxes = new Set(facts.axes.filter(([, size]) => size > 1).map(([name]) => name));
const meshPlan = { plan: null }; // as it was drawn last

/** Where every cell stands, for a width: {cell, gap, height, at(rank), bands}. */
function meshLayout(width) {
  const sizes = facts.axes.filter(([, size]) => size > 1).map(([name, size]) => ({ name, size }));
  const strip = sizes.at(-1)?.size ?? 1;
  const strips = sizes.at(-2)?.size ?? 1;
  const bands = world / (strip * strips);
  const label = bands > 1 ? 92 : 0;
  const tallest = Math.max(240, Math.min(560, innerHeight * 0.62));
  let best = null;
  for (const cell of [58, 46, 34, 28, 22, 17, 13, 10, 8, 6, 5, 4, 3]) {
    const gap = cell > 40 ? 5 : cell > 12 ? 3 : cell > 5 ? 1 : 0.5;
    const between = Math.max(4, cell * 0.5);
    const wide = strip * (cell + gap) + between;
    const column = wide <= width - label || strip === 1;
    const most = column ? Math.max(1, Math.floor((width - label + between) / wide)) : 1;
    const perLine = Math.ceil(strips / Math.ceil(strips / most)); // lines of one length, but for the last
    const cellsPerLine = column ? strip : Math.max(1, Math.floor((width - label) / (cell + gap)));
    const stripLines = column ? 1 : Math.ceil(strip / cellsPerLine);
    const lines = Math.ceil(strips / perLine) * stripLines;
    const bandHeight = lines * (cell + gap) + (bands > 1 ? Math.max(6, cell / 4) : 0);
    best = { cell, gap, between, wide, perLine, cellsPerLine, stripLines, bandHeight, label, strip, strips, bands, sizes };
    if (bands * bandHeight + 8 <= tallest) break;
  }
  best.height = Math.ceil(best.bands * best.bandHeight + 8);
  return best;
}

function cellOf(plan, rank) {
  const within = rank % plan.strip;
  const index = Math.floor(rank / plan.strip) % plan.strips;
  const band = Math.floor(rank / (plan.strip * plan.strips));
  const pitch = plan.cell + plan.gap;
  const line = Math.floor(index / plan.perLine) * plan.stripLines + Math.floor(within / plan.cellsPerLine);
  return {
    x: plan.label + (index % plan.perLine) * plan.wide + (within % plan.cellsPerLine) * pitch,
    y: 4 + band * plan.bandHeight + line * pitch,
  };
}

function rankUnder(plan, x, y) {
  const pitch = plan.cell + plan.gap;
  const band = Math.floor((y - 4) / plan.bandHeight);
  const line = Math.floor((y - 4 - band * plan.bandHeight) / pitch);
  const column = Math.floor((x - plan.label) / plan.wide);
  const inStrip = Math.floor((x - plan.label - column * plan.wide) / pitch);
  const within = (line % plan.stripLines) * plan.cellsPerLine + inStrip;
  const index = Math.floor(line / plan.stripLines) * plan.perLine + column;
  if (band < 0 || band >= plan.bands || inStrip < 0 || inStrip >= plan.cellsPerLine || within >= plan.strip) return null;
  if (column < 0 || column >= plan.perLine || index >= plan.strips || x < plan.label) return null;
  return (band * plan.strips + index) * plan.strip + within;
}

/** Axis → the ranks that differ from a rank along it alone. */
function company(rank) {
  return new Map(facts.axes.filter(([, size]) => size > 1).map(([name]) => [name, groupOf(rank, [name])]));
}

function coordinateText(rank) {
  return Object.entries(coordinate(rank)).filter(([axis]) => sizeOf(axis) > 1).map(([axis, i]) => `${axis} ${i}`).join(" · ");
}

function branchesOf(rank) {
  return facts.places.map((_, p) => p).filter((p) => p > 0 && standsAt(rank, p) !== null);
}

function aboutRank(rank) {
  const lines = [`rank ${rank}`, coordinateText(rank)].filter(Boolean);
  if (facts.perNode && world > facts.perNode) lines.push(`node ${Math.floor(rank / facts.perNode)}`);
  const stages = facts.stageRank.map((pp, s) => [pp, s]).filter(([pp]) => pp === (coordinate(rank).pp ?? 0)).map(([, s]) => s);
  if (facts.stages.length) lines.push(`runs ${stages.length > 1 ? "stages" : "stage"} ${stages.join(", ")}`);
  for (const p of branchesOf(rank)) lines.push(`branch ${facts.places[p].on}: ${facts.places[p].modules.join(", ")}`);
  lines.push(`holds ${sizeText(bytesAt(rank))} of weights at rest`);
  return lines;
}

function drawMesh(context, width, height, pointed) {
  const plan = (meshPlan.plan = meshLayout(width));
  const centre = pointed ?? chosen.rank;
  const groups = company(centre);
  const colours = new Map();
  for (const [axis, ranks] of groups) {
    if (shownAxes.has(axis)) for (const rank of ranks) colours.set(rank, axisColour(axis));
  }
  const plain = css("cell");
  const round = Math.min(5, plan.cell / 5);
  const numbers = plan.cell >= 17 && world <= 1000;
  shadeNodes(context, plan);
  for (let rank = 0; rank < world; rank++) {
    const { x, y } = cellOf(plan, rank);
    const colour = rank === centre ? css("ink") : colours.get(rank) ?? plain;
    context.fillStyle = colour;
    if (plan.cell >= 8) {
      context.beginPath();
      context.roundRect(x, y, plan.cell, plan.cell, round);
      context.fill();
    } else context.fillRect(x, y, plan.cell, plan.cell);
    if (numbers) {
      const ink = colour === plain ? css("muted") : inkOn(colour);
      const size = rank > 99 ? Math.min(10, plan.cell / 2.2) : Math.min(15, plan.cell / 2);
      write(context, `${rank}`, x + plan.cell / 2, y + plan.cell / 2 + 0.5, { colour: ink, align: "center", bold: rank === centre, size });
    }
  }
  if (chosen.rank !== centre || plan.cell < 8) {
    const { x, y } = cellOf(plan, chosen.rank);
    context.strokeStyle = css("ink");
    context.lineWidth = 2;
    context.strokeRect(x - 2, y - 2, plan.cell + 4, plan.cell + 4);
  }
  bandLabels(context, plan);
}

const nodes = facts.perNode && world > facts.perNode ? Math.ceil(world / facts.perNode) : 1;

/** Shades every second node. */
function shadeNodes(context, plan) {
  if (nodes === 1) return;
  context.fillStyle = css("node");
  const [half, whole] = [plan.gap / 2, plan.cell + plan.gap];
  for (let rank = 0; rank < world; rank++) {
    if (Math.floor(rank / facts.perNode) % 2 === 0) continue;
    const { x, y } = cellOf(plan, rank);
    context.fillRect(x - half, y - half, whole, whole);
  }
}

function bandLabels(context, plan) {
  if (plan.bands === 1) return;
  const outer = plan.sizes.slice(0, -2);
  const every = Math.max(1, Math.ceil(14 / plan.bandHeight));
  for (let band = 0; band < plan.bands; band += every) {
    const at = coordinate(band * plan.strip * plan.strips);
    const text = outer.map(({ name }) => `${name} ${at[name]}`).join(" · ");
    const y = 4 + band * plan.bandHeight + Math.min(plan.bandHeight - 8, plan.cell) / 2 + 0.5;
    write(context, text, 0, y, { colour: css("muted"), most: plan.label - 6 });
  }
}

function meshStep(rank, key) {
  if (rank === null) return chosen.rank;
  const plan = meshPlan.plan;
  const pitch = plan.cell + plan.gap;
  if (key === "left" || key === "right") return Math.max(0, Math.min(world - 1, rank + (key === "left" ? -1 : 1)));
  const { x, y } = cellOf(plan, rank);
  const way = key === "up" ? -1 : 1;
  for (let far = 1; far < 4; far += 0.5) {
    const next = rankUnder(plan, x + plan.cell / 2, y + plan.cell / 2 + way * far * pitch);
    if (next !== null && next !== rank) return next;
  }
  return rank;
}

const meshPicture = picture(`The mesh: ${plural(world, "rank")}. Arrow keys move from rank to rank, Enter chooses one.`, {
  height: (width) => meshLayout(width).height,
  draw: drawMesh,
  hit: (x, y) => rankUnder(meshPlan.plan, x, y),
  say: (rank) => {
    const shared = [...company(chosen.rank)].filter(([, ranks]) => rank !== chosen.rank && ranks.includes(rank)).map(([axis]) => axis);
    const lines = aboutRank(rank);
    if (shared.length) lines.push(`with rank ${chosen.rank} on ${shared.join(", ")}`);
    return lines;
  },
  where: (rank) => {
    const { x, y } = cellOf(meshPlan.plan, rank);
    return { x: x + meshPlan.plan.cell / 2, y: y + meshPlan.plan.cell / 2 };
  },
  step: meshStep,
  choose: chooseRank,
});

/** Ranks that hold the same weights: they differ along axes that cut nothing. */
function copiesOf(rank) {
  return sizeOf("dp_replicate") > 1 ? groupOf(rank, ["dp_replicate"]).filter((other) => other !== rank) : [];
}

function rankPanel() {
  const rank = chosen.rank;
  const axes = [...company(rank)].map(([axis, ranks]) =>
    el(
      "li",
      {},
      el("button", {
        class: "axis", type: "button", "aria-pressed": String(shownAxes.has(axis)), style: `--axis:${axisColour(axis)}`,
        title: `Show or hide the ranks along ${axis}`,
        onclick: () => { shownAxes.has(axis) ? shownAxes.delete(axis) : shownAxes.add(axis); redraw(); },
      }, `${axis} ${coordinate(rank)[axis]} of ${sizeOf(axis)}`),
      el("span", { class: "with", text: `ranks ${ranksText(ranks)}` }),
      el("span", { class: "note", text: AXES[axis] ?? "" }),
    ));
  const copies = copiesOf(rank);
  const lines = aboutRank(rank).slice(world > 1 ? 2 : 1); // the heading has the first of them
  if (copies.length) lines.push(`holds the same weights, bit for bit, as ${rankWord(copies)}`);
  return [
    el("h3", {}, `Rank ${rank}`, el("small", { text: coordinateText(rank) })),
    el("ul", { class: "axes" }, axes),
    el("ul", { class: "facts" }, lines.map((line) => el("li", { text: line }))),
  ];
}

const GROUPS = 64; // of an axis that are spelt out

function meshTable() {
  const rows = facts.axes.filter(([, size]) => size > 1).map(([axis]) => {
    const groups = [];
    for (let rank = 0; rank < world && groups.length <= GROUPS; rank++) {
      if (coordinate(rank)[axis] === 0) groups.push(`{${ranksText(groupOf(rank, [axis]), 16)}}`);
    }
    const spelled = groups.slice(0, GROUPS).join("  ") + (groups.length > GROUPS ? "  …" : "");
    return nodes > 1 ? [axis, facts.links[axis], spelled] : [axis, spelled];
  });
  const titles = nodes > 1 ? ["axis", "links", "groups of ranks"] : ["axis", "groups of ranks"];
  return table("Groups of ranks along each axis", titles, rows);
}

byId("mesh-picture").append(meshPicture);
if (nodes > 1) byId("mesh-picture").append(el("p", { class: "muted", text: `${nodes} nodes of ${facts.perNode} ranks; every second node is shaded.` }));
if (world > 1) {
  byId("mesh-picture").append(tableBehind("The groups as a table", meshTable));
  byId("mesh-picture").querySelector("details").open = world <= 32;
}
views.push(() => {
  meshPicture.paint();
  byId("rank-panel").replaceChildren(...rankPanel());
});
