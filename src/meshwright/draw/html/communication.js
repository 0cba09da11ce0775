// Communication: bytes by axis and module; and functions that ran whole, with the line of the model.

const traffic = facts.communication;
const chosenRole = { name: traffic.exchanges[0]?.[0] ?? "" };

function exchangesOf(role) {
  return traffic.exchanges.filter(([of]) => of === role).map(([, axis, kind, module, calls, bytes]) => ({ axis, kind, module, calls, bytes }));
}

const firstAxis = (axis) => axisColour(axis.split("·")[0]);

function axisBars(exchanges) {
  const sums = new Map();
  for (const { axis, bytes } of exchanges) sums.set(axis, (sums.get(axis) ?? 0) + bytes);
  const most = Math.max(...sums.values());
  return el("ul", { class: "axisbars" }, [...sums].sort((a, b) => b[1] - a[1]).map(([axis, bytes]) =>
    el("li", {}, el("span", { class: "name", text: axis }), bar(bytes / most, firstAxis(axis)), el("span", { class: "number", text: sizeText(bytes) }))));
}

function exchangeTable(exchanges) {
  const most = Math.max(...exchanges.map((one) => one.bytes));
  const counted = exchanges.some((one) => one.calls);
  const rows = [...exchanges].sort((a, b) => b.bytes - a.bytes).slice(0, 200).map(({ axis, kind, module, calls, bytes }) => [
    el("span", { class: "cut", style: `--axis:${firstAxis(axis)}`, text: axis }), kind.replaceAll("_", "-"), module,
    ...(counted ? [`${+calls.toFixed(1)}`] : []), sizeText(bytes), bar(bytes / most, firstAxis(axis)),
  ]);
  return table("What is exchanged in a step", ["axis", "collective", "for", ...(counted ? ["calls"] : []), "bytes", ""], rows, counted ? [3, 4] : [3]);
}

function wholeTable() {
  return table("Functions whose inputs are gathered", ["function", "module", "line"], traffic.ranWhole.map((one) => [one.function, one.module || "the model", one.line]));
}

views.push(() => {
  const roles = [...new Set(traffic.exchanges.map(([role]) => role))];
  const here = memory.roles[roleOf(chosen.rank)]?.name;
  if (roles.includes(here)) chosenRole.name = here;
  const exchanges = exchangesOf(chosenRole.name);
  const whose = roles.length > 1 ? el("h3", { text: `${chosenRole.name}, as rank ${chosen.rank}` }) : null;
  const none = el("p", { class: "muted", text: world === 1 ? "One rank exchanges nothing." : "The plan alone names no exchange." });
  byId("exchanges").replaceChildren(...[whose, ...(exchanges.length ? [axisBars(exchanges), exchangeTable(exchanges)] : [none])].filter(Boolean));
  byId("ran-whole").replaceChildren(...(traffic.ranWhole.length ? [el("h3", { text: "Gathered inputs" }), el("p", { class: "muted", text: "These functions have no rule for shards, so their inputs are gathered first: the result is right, and slower." }), wholeTable()] : []));
});
