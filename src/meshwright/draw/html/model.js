// The model: its modules as a tree, repeated blocks folded; a line a parameter, with its layout on each axis.

const modelAxes = facts.axes.filter(([, size]) => size > 1).map(([name]) => name);
if (!modelAxes.includes("dp_shard") && facts.rows.some((row) => row.shards > 1)) modelAxes.push("dp_shard");
const closed = new Set();
const OPEN = 200; // lines, of a model that has more, are open at first
const MOST = 1000; // lines that are drawn at once
let wanted = "";

/** Nodes: {label, path, children, row}; a module with one child is one node with it. */
function moduleTree() {
  const root = { label: "", path: "", children: new Map(), row: null };
  facts.rows.forEach((row, index) => {
    if (wanted && ![row.label, ...row.aliases, ...row.variants.map((one) => one.label)].some((name) => name.toLowerCase().includes(wanted))) return;
    let node = root;
    for (const label of row.label.split(".")) {
      const path = node.path ? `${node.path}.${label}` : label;
      if (!node.children.has(label)) node.children.set(label, { label, path, children: new Map(), row: null });
      node = node.children.get(label);
    }
    node.row = index;
  });
  const joined = (node) => {
    node.children = new Map([...node.children].map(([label, child]) => [label, joined(child)]));
    if (node.path && node.children.size === 1 && node.row === null) {
      const only = [...node.children.values()][0];
      return { ...only, label: `${node.label}.${only.label}` };
    }
    return node;
  };
  return joined(root);
}

/** The variant of a row that a rank holds: that of its stage; or -1. */
const variantOf = (row, rank) => row.variants.findIndex((one) => holds(row, one.stages, rank));

function stagesText(row) {
  const stages = [...new Set(row.variants.flatMap((one) => one.stages))].sort((a, b) => a - b);
  return `${stages.length > 1 ? "stages" : "stage"} ${ranksText(stages)}`;
}

function layoutCell(row, axis) {
  const text = axis === "pp" ? stagesText(row) : row.layouts[axis] ?? "Replicate";
  const cut = axis !== "pp" && text !== "Replicate";
  return el("td", {}, cut ? el("span", { class: "cut", style: `--axis:${axisColour(axis)}`, text }) : el("span", { class: "muted", text }));
}

function parameterLine(node, depth) {
  const row = facts.rows[node.row];
  const variant = variantOf(row, chosen.rank);
  const held = variant < 0 ? "nothing" : briefText(slicesOf(row, chosen.rank), row.shape);
  const selected = chosen.row === node.row;
  return el(
    "tr",
    { "aria-selected": String(selected), class: selected ? "selected" : null, "data-row": node.row },
    el(
      "th",
      { scope: "row", style: `--depth:${depth}` },
      el("button", {
        type: "button", class: "parameter", "aria-pressed": String(selected), "aria-label": `${row.label}: draw it`,
        onclick: () => chooseRow(node.row),
      }, node.label),
      row.count > 1 ? el("span", { class: "times", text: `× ${row.count}` }) : null,
      row.trained ? null : el("span", { class: "times", text: "frozen" }),
    ),
    el("td", { class: "shape", text: shapeText(row.shape) }),
    modelAxes.map((axis) => layoutCell(row, axis)),
    facts.places.length > 1 ? el("td", { text: row.places.map((p) => facts.places[p].on || "trunk").join(", ") }) : null,
    el("td", { class: "number", text: sizeText(bytesOf(row) * row.count) }),
    el("td", { class: "holds", text: held }),
  );
}

function treeLines(node, depth) {
  return [...node.children.values()].flatMap((child) => {
    if (child.row !== null) return [parameterLine(child, depth)];
    const shut = closed.has(child.path) && !wanted; // what is looked for is shown
    const toggle = () => { shut ? closed.delete(child.path) : closed.add(child.path); redraw(); };
    const columns = modelAxes.length + 3 + (facts.places.length > 1 ? 1 : 0);
    const head = el(
      "tr",
      { class: "module" },
      el("th", { scope: "row", style: `--depth:${depth}` },
        el("button", { type: "button", class: "fold", "aria-expanded": String(!shut), onclick: toggle }, child.label)),
      el("td", { colspan: columns, class: "muted", text: shut ? plural(leavesOf(child), "parameter") : "" }),
    );
    return shut ? [head] : [head, ...treeLines(child, depth + 1)];
  });
}

const leavesOf = (node) => [...node.children.values()].reduce((sum, child) => sum + (child.row !== null ? facts.rows[child.row].count : leavesOf(child)), 0);

/** The upper modules of a large model stay open, as many as fit a few screens. */
function closeDeep() {
  const modules = [moduleTree()];
  let lines = modules[0].children.size;
  for (const module of modules) { // which grows
    for (const child of module.children.values()) {
      if (child.row !== null) continue;
      if (lines + child.children.size > OPEN) closed.add(child.path);
      else lines += child.children.size;
      modules.push(child);
    }
  }
}

/** The lines of the tree, and how many are left out. */
function bodyLines() {
  const lines = treeLines(moduleTree(), 0);
  const said = lines.length > MOST ? `and ${plural(lines.length - MOST, "more line")}: find a part of a name` : wanted && !lines.length ? "no parameter has this in its name" : "";
  return said ? [...lines.slice(0, MOST), el("tr", {}, el("td", { class: "muted", colspan: modelAxes.length + 5, text: said }))] : lines;
}

function modelTable() {
  const titles = ["parameter", "shape", ...modelAxes.map((axis) => `${axis} = ${sizeOf(axis)}`), ...(facts.places.length > 1 ? ["place"] : []), "bytes", `rank ${chosen.rank} holds`];
  return el(
    "table",
    { class: "tree" },
    el("caption", { class: "unseen", text: "Every parameter and its layout on each axis" }),
    el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col", class: title === "bytes" ? "number" : null, text: title })))),
    el("tbody", {}, bodyLines()),
  );
}

function chooseRow(index) {
  chosen.row = index;
  chosen.variant = Math.max(0, variantOf(facts.rows[index], chosen.rank));
  redraw();
}

// --- stages and branches ---------------------------------------------------------------------------------------------

function stageTable() {
  const most = Math.max(...facts.stages.map((stage) => stage.work));
  const here = coordinate(chosen.rank).pp ?? 0;
  const rows = facts.stages.map((stage, s) => {
    const at = facts.stageRank[s];
    const ranks = groupOf(rankAt({ pp: at }), facts.axes.map(([name]) => name).filter((name) => name !== "pp"));
    const name = el("span", { class: at === here ? "here" : null, text: String(s) });
    return [name, ranksText(ranks), stage.from, stage.to, el("span", { class: "withbar" }, bar(stage.work / most, axisColour("pp")), percentText(stage.work)),
      countText(stage.parameters), stage.sends ? sizeText(stage.sends) : "–"];
  });
  return table("Stages of the pipeline", ["stage", "ranks", "from", "to", "work", "parameters", "sends on"], rows, [5, 6]);
}

function branchTable() {
  const rows = facts.places.slice(1).map((place, i) => {
    const ranks = Array.from({ length: world }, (_, rank) => rank).filter((rank) => standsAt(rank, i + 1) !== null);
    return [place.on, ranksText(ranks), place.axes.map(([name, size]) => `${name}=${size}`).join(" × "), place.modules.join(", "),
      countText(place.numel), el("span", { class: "withbar" }, bar(place.work, axisColour("tp")), percentText(place.work))];
  });
  return table("Branches, which run at the same time", ["place", "ranks", "mesh", "modules", "parameters", "work"], rows, [4]);
}

closeDeep();
byId("find").addEventListener("input", (event) => { wanted = event.target.value.trim().toLowerCase(); redraw(); });
views.push(() => {
  const focused = document.activeElement?.closest?.("#model-table tr")?.dataset.row;
  byId("model-table").replaceChildren(modelTable());
  if (focused !== undefined) byId("model-table").querySelector(`tr[data-row="${focused}"] button`)?.focus({ preventScroll: true });
  byId("stages").replaceChildren(...(facts.stages.length ? [el("h3", { text: "Stages" }), stageTable()] : []));
  byId("branches").replaceChildren(...(facts.places.length > 1 ? [el("h3", { text: "Branches" }), branchTable()] : []));
});
