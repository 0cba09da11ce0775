// Who holds what: the rule of Recipe.held, Recipe.holds and Submeshes.at (recipe.py, submesh.py), from the axes' shares alone.

const axisSizes = Object.fromEntries(facts.axes);
const world = facts.axes.reduce((product, [, size]) => product * size, 1);
const sizeOf = (axis) => axisSizes[axis] ?? 1;

/** Where a rank stands on each axis: {pp: 0, tp: 3}. The last axis is the fastest. */
function coordinate(rank) {
  const at = Object.fromEntries(facts.axes); // in the order of the mesh
  for (const [name, size] of [...facts.axes].reverse()) {
    at[name] = rank % size;
    rank = Math.floor(rank / size);
  }
  return at;
}

function rankAt(at) {
  return facts.axes.reduce((rank, [name, size]) => rank * size + (at[name] ?? 0), 0);
}

/** The ranks that differ from a rank along some axes alone, ascending. */
function groupOf(rank, axes) {
  let group = [{ ...coordinate(rank) }];
  for (const axis of axes) {
    group = group.flatMap((at) => Array.from({ length: sizeOf(axis) }, (_, i) => ({ ...at, [axis]: i })));
  }
  return group.map(rankAt).sort((a, b) => a - b);
}

/** Where a rank stands in a place (0: the trunk), or null if it is not of it; outer axes are multiplied in. */
function standsAt(rank, place) {
  const chain = [];
  for (let p = place; p > 0; p = facts.places[p].parent) chain.unshift(p);
  const at = coordinate(rank);
  const here = { pp: at.pp ?? 0, shard: at.dp_shard ?? 0, tp: at.tp ?? 0 };
  for (const p of chain) {
    const { start, stop, axes } = facts.places[p];
    if (here.tp < start || here.tp >= stop) return null;
    let inner = here.tp - start;
    const within = {};
    for (const [name, size] of [...axes].reverse()) {
      within[name] = inner % size;
      inner = Math.floor(inner / size);
    }
    const shards = Object.fromEntries(axes).dp_shard ?? 1;
    here.shard = here.shard * shards + (within.dp_shard ?? 0);
    here.tp = within.tp ?? 0;
  }
  return here;
}

/** Whether a stage or branch on a rank uses the parameters of a row that these stages use. */
function holds(row, stages, rank) {
  const pp = coordinate(rank).pp ?? 0;
  if (!stages.some((stage) => facts.stageRank[stage] === pp)) return false;
  return (row.places.length === 1 && row.places[0] === 0) || row.places.some((place) => standsAt(rank, place) !== null);
}

/** For each dim, the half-open ranges of the whole that a rank holds, in local order. */
function slicesAt(row, at) {
  const ranges = row.shape.map((size) => (size ? [[0, size]] : []));
  if (at === null) return ranges; // of another of its places; all hold it whole
  if (row.tp) {
    const [dim, pieces] = row.tp;
    ranges[dim] = intervals(pieces, at.tp);
  }
  if (row.shards > 1) {
    const rows = ranges[0].reduce((sum, [start, stop]) => sum + stop - start, 0);
    const step = Math.ceil(rows / row.shards);
    ranges[0] = part(ranges[0], at.shard * step, Math.min((at.shard + 1) * step, rows));
  }
  return ranges;
}

function slicesOf(row, rank) {
  return slicesAt(row, standsAt(rank, row.places[0]));
}

/** The ranges of a dim that one tp rank has: its share of each fused block. */
function intervals(pieces, tp) {
  const held = [];
  let base = 0;
  for (const piece of pieces) {
    const start = base + piece.slice(0, tp).reduce((a, b) => a + b, 0);
    if (piece[tp]) held.push([start, start + piece[tp]]);
    base += piece.reduce((a, b) => a + b, 0);
  }
  return held;
}

/** Elements first to last of the concatenation of ranges. */
function part(ranges, first, last) {
  const held = [];
  let base = 0;
  for (const [start, stop] of ranges) {
    const low = Math.max(first - base, 0);
    const high = Math.min(last - base, stop - start);
    if (low < high) held.push([start + low, start + high]);
    base += stop - start;
  }
  return held;
}

const lengthOf = (ranges) => ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
const elementsOf = (slices) => slices.reduce((product, ranges) => product * lengthOf(ranges), 1);
const bytesOf = (row) => row.shape.reduce((a, b) => a * b, 1) * row.item;

/** Bytes of the parameters that a rank holds at rest. */
function bytesAt(rank) {
  let bytes = 0;
  for (const row of facts.rows) {
    const count = row.variants.reduce((sum, one) => sum + (holds(row, one.stages, rank) ? one.count : 0), 0);
    if (count) bytes += count * elementsOf(slicesOf(row, rank)) * row.item;
  }
  return bytes;
}

/** [{ranks, slices, tp, shard}] for each distinct slice of a row's parameters that these stages use, by first rank. */
function holders(row, stages) {
  const found = new Map();
  const cut = row.tp !== null || row.shards > 1;
  for (let rank = 0; rank < world; rank++) {
    if (!holds(row, stages, rank)) continue;
    const at = standsAt(rank, row.places[0]);
    const key = at === null && cut ? "whole" : at === null ? "0/0" : `${row.shards > 1 ? at.shard : 0}/${row.tp ? at.tp : 0}`;
    if (!found.has(key)) {
      found.set(key, { ranks: [], slices: slicesAt(row, at), tp: at?.tp ?? 0, shard: at?.shard ?? 0 });
    }
    found.get(key).ranks.push(rank);
  }
  return [...found.values()];
}
