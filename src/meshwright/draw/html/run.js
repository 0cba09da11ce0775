// A run: a curve for each series, over its steps.

const TITLES = { loss: "loss", grad_norm: "norm of the gradient, before clipping", rate: `${facts.unit} a second`, memory: "memory of rank 0", waiting: "share of a step that ranks wait for each other", seconds: "seconds of a step", skipped: "steps skipped so far" };
const savedAfter = new Set(facts.checkpoints.map((one) => one.step));

function valueText(name, value) {
  if (value === null) return "not finite";
  if (name === "memory") return sizeText(value);
  if (name === "seconds") return secondsText(value);
  if (name === "waiting") return `${+(100 * value).toPrecision(3)} %`;
  return name === "rate" ? countText(value) : `${+value.toPrecision(4)}`;
}

function curve(name) {
  const values = facts.series[name];
  const known = values.filter((value) => value !== null);
  const low = name === "loss" || name === "grad_norm" ? Math.min(...known) : 0;
  const most = Math.max(...known);
  const high = most > low ? most : low + 1;
  const [left, right, top, bottom] = [64, 10, 12, 22];
  const first = facts.steps[0];
  const last = Math.max(facts.steps.at(-1), first + 1);
  let wide = 0;
  const x = (i) => left + ((facts.steps[i] - first) / (last - first)) * (wide - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (170 - top - bottom);
  return picture(`${TITLES[name] ?? name}, step by step`, {
    height: () => 170,
    draw: (context, width, height, item) => {
      wide = width;
      for (const [value, share] of [[high, 1], [(low + high) / 2, 0.5], [low, 0]]) {
        context.fillStyle = css("line");
        context.fillRect(left, y(value), width - left - right, 1);
        if (share !== 0.5) write(context, valueText(name, value), left - 8, y(value), { colour: css("muted"), align: "right", size: 10 });
      }
      context.strokeStyle = css("accent");
      context.lineWidth = 1.75;
      context.beginPath();
      let drawing = false;
      values.forEach((value, i) => {
        if (value === null) drawing = false;
        else if (drawing) context.lineTo(x(i), y(value));
        else context.moveTo(x(i), y(value)), (drawing = true);
      });
      context.stroke();
      values.forEach((value, i) => {
        if (value === null || (!savedAfter.has(facts.steps[i]) && i !== item && values.length > 1)) return;
        context.fillStyle = css(i === item ? "bad" : "accent");
        context.beginPath();
        context.arc(x(i), y(value), i === item ? 4 : 3, 0, 7);
        context.fill();
      });
      write(context, `step ${first}`, left, height - 9, { colour: css("muted"), size: 10 });
      write(context, `${facts.steps.at(-1)}`, width - right, height - 9, { colour: css("muted"), size: 10, align: "right" });
    },
    hit: (at) => {
      if (at < left - 6) return null;
      let best = 0;
      facts.steps.forEach((_, i) => { if (Math.abs(x(i) - at) < Math.abs(x(best) - at)) best = i; });
      return best;
    },
    say: (i) => [`step ${facts.steps[i]}: ${valueText(name, values[i])}`, facts.times[i], ...(savedAfter.has(facts.steps[i]) ? ["saved after it"] : [])].filter(Boolean),
    where: (i) => ({ x: x(i), y: y(values[i] ?? low) }),
    step: (i, key) => (i === null ? 0 : Math.max(0, Math.min(values.length - 1, i + (key === "left" || key === "down" ? -1 : 1)))),
  });
}

function seriesTable(name) {
  return table(TITLES[name] ?? name, ["step", TITLES[name] ?? name], facts.steps.slice(-500).map((step, i, shown) => [String(step), valueText(name, facts.series[name][i + facts.steps.length - shown.length])]), [0, 1]);
}

const curves = Object.keys(facts.series).map((name) => {
  const drawn = curve(name);
  const values = facts.series[name].filter((value) => value !== null);
  byId("series").append(el("figure", { class: "role" }, el("figcaption", {}, el("strong", { text: TITLES[name] ?? name }), ` ${valueText(name, values[0])} → ${valueText(name, values.at(-1))}`), el("div", { class: "canvas" }, drawn), tableBehind("as a table", () => seriesTable(name))));
  return drawn;
});
byId("series").classList.add("grid");
byId("checkpoints").append(facts.checkpoints.length
  ? table("Checkpoints", ["name", "step", "saved", "size", "layout", ""], facts.checkpoints.map((one) => [one.name, String(one.step), one.time, sizeText(one.bytes), one.mesh, el("span", { class: one.problem ? "alarm" : "muted", text: one.problem || "all there (sizes)" })]), [1, 3])
  : el("p", { class: "muted", text: "None was completed." }));

// --- ranks -----------------------------------------------------------------------------------------------------------

if (facts.memories.length) {
  const most = Math.max(...facts.memories.map((one) => one.most));
  const rows = facts.memories.slice(0, 1024).map((one, rank) => [`rank ${rank}`, sizeText(one.last), sizeText(one.most), bar(one.most / most, "var(--accent)")]);
  byId("ranks").append(table("Memory by rank", ["rank", "last", "at most", ""], rows, [1, 2]));
  if (facts.memories.length > 1024) byId("ranks").append(el("p", { class: "muted", text: `and ${plural(facts.memories.length - 1024, "more rank")}` }));
}
if (facts.comparisons.length) {
  const kinds = [...new Set(facts.comparisons.flatMap((one) => Object.keys(one.compared)))];
  const rows = facts.comparisons.slice(-200).map((one) => [String(one.step), one.differences.length ? "differ" : "equal", ...kinds.map((kind) => String(one.compared[kind] ?? 0))]);
  byId("comparisons").append(tableBehind("Each comparison", () => table("Comparisons of ranks", ["after step", "", ...kinds], rows, [0, ...kinds.map((_, i) => i + 2)])));
}

// --- a step in time: predicted and measured on one scale -------------------------------------------------------------

const timePictures = {}; // of the step that is shown

function showStep({ step, about, measured, predicted, differences }) {
  const zoom = zooming(Math.max(measured.length, predicted?.length ?? 0));
  byId("time-title").textContent = `Step ${step} in time`;
  byId("time-about").textContent = predicted ? `Above: ${about}. Below: measured, on the same scale` : `Measured; ${about}`;
  byId("predicted").hidden = !predicted;
  for (const id of ["time-tables", "predicted-picture"]) byId(id).replaceChildren();
  delete timePictures.predicted;
  for (const [name, time] of Object.entries({ predicted, measured })) {
    if (!time) continue;
    timePictures[name] = timePicture(time, `The step in time, ${name}`, zoom);
    byId(`${name}-picture`).replaceChildren(timePictures[name]);
    byId(`${name}-length`).textContent = `${secondsText(time.length)}, of which ranks wait for ${percentText(time.idle)}`;
    byId("time-tables").append(tableBehind(`${name}, as a table`, () => timeTable(time)));
  }
  byId("time-zoom").replaceChildren(...zoom.buttons());
  byId("time-kinds").replaceChildren(kindsTable(measured, predicted, differences));
  paintStep = () => {
    for (const one of Object.values(timePictures)) one.paint();
    byId("time-legend").replaceChildren(legend([...timeLegend([measured, ...(predicted ? [predicted] : [])]), [css("bubble"), "waiting"]]));
  };
  paintStep();
}

function kindsTable(measured, predicted, differences) {
  const signed = (seconds) => `${seconds < 0 ? "−" : "+"}${secondsText(Math.abs(seconds))}`;
  const longest = Math.max(...differences.flatMap(([, ...pair]) => pair)) || 1;
  const both = (one, other) => el("span", { class: "pair" }, ...(predicted ? [bar(one / longest, "var(--muted)")] : []), bar(other / longest, "var(--accent)"));
  const all = [...differences, ["the step", predicted?.length ?? 0, measured.length]];
  const rows = all.map(([kind, one, other]) => (predicted
    ? [kind, secondsText(one), secondsText(other), signed(other - one), both(one, other)]
    : [kind, secondsText(other), both(one, other)]));
  const titles = predicted ? ["", "predicted", "measured", "difference", ""] : ["", "measured", ""];
  return table("What the time of the step went to", titles, rows, predicted ? [1, 2, 3] : [1]);
}

let paintStep = () => {};
if (facts.inTime.length) {
  const select = byId("time-step");
  select?.append(...facts.inTime.map(({ name }, i) => el("option", { value: i, selected: i === facts.at, text: name })));
  select?.addEventListener("change", () => showStep(facts.inTime[select.value]));
  showStep(facts.inTime[facts.at]);
  views.push(() => paintStep());
}

views.push(() => curves.forEach((drawn) => drawn.paint()));
themed();
window.meshwright = { facts, curves, timePictures };
