// The step in time: a line for each rank of the pipeline; what stands between its slots is the bubble.

const WHATS = { forward: "forward", backward: "backward", "backward of inputs": "backward", "backward of weights": "weights" };
const whatColour = (what) => css(WHATS[what] ? `time-${WHATS[what]}` : "time-other");
const partColour = (part) => css(part === "host" ? "time-host" : "time-wire"); // of what is not compute
const time = facts.timeline;
const zoom = { from: 0, to: time.length };
const amountText = (amount) => (time.unit === "seconds" ? secondsText(amount) : `${+amount.toPrecision(3)} forwards`);

function lineHeight() {
  return time.lines.length > 40 ? 14 : time.lines.length > 16 ? 20 : 34;
}

const timeLeft = () => (time.lines.length > 1 ? 62 : 8);
const timeX = (width, at) => timeLeft() + ((at - zoom.from) / (zoom.to - zoom.from)) * (width - timeLeft() - 10);
const slotName = (what, microbatch) => (microbatch < 0 ? what : `${{ forward: "F", backward: "B", "backward of inputs": "I", "backward of weights": "W" }[what] ?? what}${microbatch}`);

function drawStep(context, width, height, pointed) {
  drawStep.width = width;
  timeTicks(context, width, height);
  const high = lineHeight();
  const here = coordinate(chosen.rank).pp ?? 0;
  time.lines.forEach((line, i) => {
    const y = 22 + i * (high + 6);
    context.fillStyle = css("bubble");
    context.fillRect(timeX(width, Math.max(0, zoom.from)), y, timeX(width, Math.min(time.length, zoom.to)) - timeX(width, Math.max(0, zoom.from)), high);
    if (time.lines.length > 1) write(context, `${line.stages.length > 1 ? "stages" : "stage"} ${line.stages.join(", ")}`, 0, y + high / 2, { colour: css(i === here ? "ink" : "muted"), bold: i === here, most: 58 });
    line.slots.forEach((slot, s) => drawSlot(context, width, y, high, slot, pointed?.line === i && pointed.slot === s));
  });
  drawTransfers(context, width, high);
}

function drawSlot(context, width, y, high, [start, stop, what, , microbatch, part], pointed) {
  if (stop < zoom.from || start > zoom.to) return;
  const x = Math.max(timeX(width, start), timeLeft());
  const w = Math.min(timeX(width, stop), width - 10) - x;
  const colour = whatColour(time.whats[what]);
  context.fillStyle = colour;
  context.fillRect(x, y, Math.max(0.7, w - (w > 3 ? 1 : 0)), high);
  const parts = Object.entries(time.parts[part]);
  if (w > 4 && parts.length > 1) {
    let at = x;
    const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
    for (const [name, amount] of parts) {
      const wide = ((w - 1) * amount) / whole;
      if (name !== "compute") {
        context.fillStyle = partColour(name);
        context.fillRect(at, y + high - Math.max(3, high * 0.2), wide, Math.max(3, high * 0.2));
      }
      at += wide;
    }
  }
  const name = slotName(time.whats[what], microbatch);
  if (w > 14 && high > 12) write(context, name, x + w / 2, y + high / 2 - (parts.length > 1 ? 2 : 0), { colour: inkOn(colour), align: "center", most: w - 3, size: Math.min(11, high - 4), whole: true });
  if (pointed) {
    context.strokeStyle = css("ink");
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, Math.max(1, w - 2), high - 2);
  }
}

function drawTransfers(context, width, high) {
  const shown = time.transfers.filter(([, , start, stop]) => stop >= zoom.from && start <= zoom.to);
  if (shown.length > 600) return; // too dense to be told apart: seen after zooming in
  context.strokeStyle = css("time-wire");
  context.fillStyle = css("time-wire");
  context.lineWidth = 1;
  for (const [source, target, start, stop] of shown) {
    const [x1, x2] = [timeX(width, start), Math.max(timeX(width, stop), timeX(width, start))];
    const down = target > source;
    const [y1, y2] = [22 + source * (high + 6) + (down ? high : 0), 22 + target * (high + 6) + (down ? 0 : high)];
    context.globalAlpha = Math.abs(target - source) > 1 ? 0.35 : 0.9;
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
    context.beginPath();
    context.arc(x2, y2, 1.8, 0, 7);
    context.fill();
  }
  context.globalAlpha = 1;
}

function timeTicks(context, width, height) {
  const span = zoom.to - zoom.from;
  const raw = span / Math.max(2, Math.floor(width / 110));
  const power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((m) => m * power).find((one) => one >= raw);
  context.fillStyle = css("line");
  for (let at = Math.ceil(zoom.from / tick) * tick; at <= zoom.to + tick / 1e6; at += tick) {
    const x = timeX(width, at);
    context.fillStyle = css("line");
    context.fillRect(x, 15, 1, 6);
    write(context, time.unit === "seconds" ? secondsText(at) : `${+at.toPrecision(3)}`, x, 8, { colour: css("muted"), align: at > zoom.from + span * 0.96 ? "right" : at ? "center" : "left", size: 10 });
  }
}

function slotUnder(x, y) {
  const line = Math.floor((y - 22) / (lineHeight() + 6));
  const width = drawStep.width;
  if (line < 0 || line >= time.lines.length || x < timeLeft()) return null;
  const slots = time.lines[line].slots;
  const slot = slots.findIndex(([start, stop]) => x >= timeX(width, start) && x <= timeX(width, stop));
  return slot < 0 ? null : sameSlot(line, slot);
}

/** The same object for the same slot, so that a picture knows that it is pointed at still. */
const sameSlot = (() => {
  const known = new Map();
  return (line, slot) => {
    const key = `${line}/${slot}`;
    if (!known.has(key)) known.set(key, { line, slot });
    return known.get(key);
  };
})();

function aboutSlot({ line, slot }) {
  const [start, stop, what, stage, microbatch, part] = time.lines[line].slots[slot];
  const of = microbatch < 0 ? "" : ` of microbatch ${microbatch}${facts.stages.length ? `, stage ${stage}` : ""}`;
  const lines = [`${time.whats[what]}${of}`, `${amountText(stop - start)}, from ${amountText(start)} on`];
  for (const [name, amount] of Object.entries(time.parts[part])) lines.push(`${name}: ${amountText(amount)}`);
  const sent = time.transfers.filter(([source, , begins, , , m]) => source === line && m === microbatch && begins >= stop - 1e-9 * time.length && begins <= stop + time.length * 1e-3);
  for (const [, target, begins, ends, way, , bytes] of sent.slice(0, 2)) {
    const size = bytes >= 0 ? `${sizeText(bytes)}, ` : "";
    lines.push(`then sends ${way === "forward" ? "values" : "gradients"} to stage ${time.lines[target].stages.join(", ")}${time.unit === "seconds" ? ` (${size}${secondsText(ends - begins)})` : ""}`);
  }
  return lines;
}

const stepPicture = picture("The step in time. Left and right arrows move from slot to slot, up and down from stage to stage.", {
  height: () => 22 + time.lines.length * (lineHeight() + 6) + 6,
  draw: drawStep,
  hit: slotUnder,
  say: aboutSlot,
  where: ({ line, slot }) => {
    const [start, stop] = time.lines[line].slots[slot];
    return { x: timeX(drawStep.width, (start + stop) / 2), y: 22 + line * (lineHeight() + 6) + lineHeight() / 2 };
  },
  step: (item, key) => {
    if (item === null) return sameSlot(coordinate(chosen.rank).pp ?? 0, 0);
    const { line, slot } = item;
    if (key === "left" || key === "right") return sameSlot(line, Math.max(0, Math.min(time.lines[line].slots.length - 1, slot + (key === "left" ? -1 : 1))));
    const next = Math.max(0, Math.min(time.lines.length - 1, line + (key === "up" ? -1 : 1)));
    const middle = (time.lines[line].slots[slot][0] + time.lines[line].slots[slot][1]) / 2;
    const near = time.lines[next].slots.map(([start, stop], i) => [Math.abs((start + stop) / 2 - middle), i]).sort((a, b) => a[0] - b[0])[0][1];
    return sameSlot(next, near);
  },
});

function zoomTo(from, to) {
  const span = Math.max(time.length / 400, Math.min(time.length, to - from));
  zoom.from = Math.max(0, Math.min(time.length - span, from));
  zoom.to = zoom.from + span;
  stepPicture.paint();
}

function zoomBy(factor, middle = (zoom.from + zoom.to) / 2) {
  zoomTo(middle - (middle - zoom.from) * factor, middle + (zoom.to - middle) * factor);
}

function stepTable() {
  const rows = time.lines.flatMap((line) => line.slots.slice(0, 200).map(([start, stop, what, stage, microbatch]) => [line.stages.join(", "), time.whats[what], microbatch < 0 ? "–" : String(microbatch), amountText(start), amountText(stop - start)]));
  return table("What each stage does when", ["stage", "what", "microbatch", "begins", "takes"], rows.slice(0, 1000), [3, 4]);
}

// --- the terms of a step, plans side by side -------------------------------------------------------------------------

function termColour(term) {
  if (term === "compute") return css("time-forward");
  if (term === "host") return css("time-host");
  if (term.startsWith("communication")) return css("time-wire");
  return term.startsWith("waiting") || term === "shared cores" ? css("time-wait") : css("time-other");
}

function waterfall(step, longest) {
  let done = 0;
  const lines = Object.entries(step.terms).map(([term, seconds]) => {
    const from = done;
    done += seconds;
    return el("tr", {},
      el("th", { scope: "row", text: term }),
      el("td", { class: "number", text: secondsText(seconds) }),
      el("td", { class: "number muted", text: percentText(seconds / step.seconds[0]) }),
      el("td", { class: "fall" }, el("span", { style: `margin-left:${(100 * from) / longest}%;width:${Math.max(0.3, (100 * seconds) / longest)}%;background:${termColour(term)}` })));
  });
  const [mean, low, high] = step.seconds;
  const verdict = step.capacity ? ` · ${sizeText(step.peak)} live at the peak: ${step.fits ? "fits" : "does not fit"} ${sizeText(step.capacity)}` : "";
  return el("figure", { class: "waterfall" },
    el("figcaption", {}, el("strong", { text: step.name }), ` ${step.mesh} on ${step.hardware}, ${step.source}`,
      el("span", { class: step.fits ? "muted" : "alarm", text: verdict })),
    el("table", {}, el("caption", { class: "unseen", text: `Terms of a step: ${step.name}` }), el("tbody", {}, lines),
      el("tfoot", {}, el("tr", {}, el("th", { scope: "row", text: "a step" }), el("td", { class: "number", text: secondsText(mean) }), el("td", {}),
        el("td", { class: "muted", text: `${secondsText(low)} to ${secondsText(high)}` })))));
}

byId("step-picture").append(stepPicture);
byId("zoom").append(
  el("button", { type: "button", onclick: () => zoomBy(0.5), "aria-label": "Zoom in" }, "+"),
  el("button", { type: "button", onclick: () => zoomBy(2), "aria-label": "Zoom out" }, "−"),
  el("button", { type: "button", onclick: () => zoomTo(zoom.from - (zoom.to - zoom.from) / 2, zoom.to - (zoom.to - zoom.from) / 2), "aria-label": "Earlier" }, "←"),
  el("button", { type: "button", onclick: () => zoomTo(zoom.from + (zoom.to - zoom.from) / 2, zoom.to + (zoom.to - zoom.from) / 2), "aria-label": "Later" }, "→"),
  el("button", { type: "button", onclick: () => zoomTo(0, time.length) }, "whole step"),
);
byId("step").append(tableBehind("The step as a table", stepTable));
views.push(() => {
  stepPicture.paint();
  const kinds = [...new Set(time.lines.flatMap((line) => line.slots.map((slot) => time.whats[slot[2]])))];
  const parts = [...new Set(time.parts.flatMap((one) => Object.keys(one)))].filter((part) => part !== "compute");
  const together = new Map(); // what has one colour stands together
  for (const what of kinds) together.set(whatColour(what), [...(together.get(whatColour(what)) ?? []), what]);
  const entries = [...together].map(([colour, whats]) => [colour, whats.join(", ")]);
  if (parts.includes("host")) entries.push([css("time-host"), "of that, the host"]);
  if (parts.some((part) => part.startsWith("communication"))) entries.push([css("time-wire"), "of that, exposed communication"]);
  if (time.transfers.length) entries.push([css("time-wire"), "sends to another stage"]);
  if (time.lines.length > 1) entries.push([css("bubble"), `bubble: ${percentText(time.idle)} of the ranks’ time`]);
  byId("step-legend").replaceChildren(legend(entries));
  const longest = Math.max(...facts.steps.map((step) => Math.max(step.seconds[0], Object.values(step.terms).reduce((a, b) => a + b, 0))));
  byId("terms").replaceChildren(...facts.steps.map((step) => waterfall(step, longest)));
});
