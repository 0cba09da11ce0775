// A step in time, planned, predicted or measured: a line for each rank of the pipeline; what stands between its slots is the
// bubble. Several pictures may share a zoom, and so a scale.

const WHATS = { forward: "forward", backward: "backward", "backward of inputs": "backward", "backward of weights": "weights" };
const SHORT = { forward: "F", backward: "B", "backward of inputs": "I", "backward of weights": "W" };
const whatColour = (what) => css(WHATS[what] ? `time-${WHATS[what]}` : "time-other");
const partColour = (part) => css(part === "host" ? "time-host" : "time-wire"); // of what is not compute
/** A line of several stages names the stage of each slot: 2F0 is stage 2, forward, microbatch 0. */
const slotName = (line, [, , , stage, microbatch], what) => (microbatch < 0 ? what : `${line.stages.length > 1 ? stage : ""}${SHORT[what] ?? what}${microbatch}`);
const lineName = (line) => `${line.stages.length > 1 ? "stages" : "stage"} ${line.stages.join(", ")}`;

/** How much of the time is shown, up to `length`; `paint`: functions that draw the pictures anew. */
function zooming(length) {
  const zoom = { from: 0, to: length, paint: [] };
  zoom.show = (from, to) => {
    const span = Math.max(length / 400, Math.min(length, to - from));
    zoom.from = Math.max(0, Math.min(length - span, from));
    zoom.to = zoom.from + span;
    for (const paint of zoom.paint) paint();
  };
  zoom.by = (factor) => {
    const [middle, half] = [(zoom.from + zoom.to) / 2, ((zoom.to - zoom.from) / 2) * factor];
    zoom.show(middle - half, middle + half);
  };
  const move = (share) => zoom.show(zoom.from + share * (zoom.to - zoom.from), zoom.to + share * (zoom.to - zoom.from));
  zoom.buttons = () => [
    el("button", { type: "button", onclick: () => zoom.by(0.5), "aria-label": "Zoom in" }, "+"),
    el("button", { type: "button", onclick: () => zoom.by(2), "aria-label": "Zoom out" }, "−"),
    el("button", { type: "button", onclick: () => move(-0.5), "aria-label": "Earlier" }, "←"),
    el("button", { type: "button", onclick: () => move(0.5), "aria-label": "Later" }, "→"),
    el("button", { type: "button", onclick: () => zoom.show(0, length) }, "whole step"),
  ];
  return zoom;
}

/** A timeline as a picture. `here()`: the line that is followed, or -1. */
function timePicture(time, label, zoom, here = () => -1) {
  const amountText = (amount) => (time.unit === "seconds" ? secondsText(amount) : `${+amount.toPrecision(3)} forwards`);
  const high = time.lines.length > 40 ? 14 : time.lines.length > 16 ? 20 : 34;
  const left = time.lines.length > 1 ? Math.min(140, 14 + 7 * Math.max(...time.lines.map((line) => lineName(line).length))) : 8;
  const top = (line) => 22 + line * (high + 6);
  let wide = 0;
  const x = (at) => left + ((at - zoom.from) / (zoom.to - zoom.from)) * (wide - left - 10);
  const within = (at) => Math.max(left, Math.min(wide - 10, x(at)));
  const exchanges = time.lines.map((_, i) => time.exchanges.filter(([line]) => line === i));

  function draw(context, width, _, pointed) {
    wide = width;
    ticks(context);
    time.lines.forEach((line, i) => {
      const y = top(i);
      context.fillStyle = css("bubble");
      context.fillRect(within(0), y, within(time.length) - within(0), high);
      const bold = i === here();
      if (time.lines.length > 1) write(context, lineName(line), 0, y + high / 2, { colour: css(bold ? "ink" : "muted"), bold, most: left - 4 });
      line.slots.forEach((slot, s) => drawSlot(context, y, line, slot, pointed?.line === i && pointed.slot === s, !exchanges[i].length));
      drawExchanges(context, y, exchanges[i]);
    });
    drawTransfers(context);
  }

  function drawSlot(context, y, line, slot, pointed, withParts) {
    const [start, stop, what, , , part] = slot;
    if (stop < zoom.from || start > zoom.to) return;
    const from = within(start);
    const w = within(stop) - from;
    const colour = whatColour(time.whats[what]);
    context.fillStyle = colour;
    context.fillRect(from, y, Math.max(0.7, w - (w > 3 ? 1 : 0)), high);
    const parts = Object.entries(time.parts[part]);
    if (withParts && w > 4 && parts.length > 1) {
      let at = from;
      const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
      for (const [name, amount] of parts) {
        const share = ((w - 1) * amount) / whole;
        if (name !== "compute") {
          context.fillStyle = partColour(name);
          context.fillRect(at, y + high - Math.max(3, high * 0.2), share, Math.max(3, high * 0.2));
        }
        at += share;
      }
    }
    const name = slotName(line, slot, time.whats[what]);
    if (w > 14 && high > 12) write(context, name, from + w / 2, y + high / 2 - (parts.length > 1 ? 2 : 0), { colour: inkOn(colour), align: "center", most: w - 3, size: Math.min(11, high - 4), whole: true });
    if (pointed) {
      context.strokeStyle = css("ink");
      context.lineWidth = 2;
      context.strokeRect(from + 1, y + 1, Math.max(1, w - 2), high - 2);
    }
  }

  /** Collectives, each where it was. */
  function drawExchanges(context, y, those) {
    context.fillStyle = css("time-wire");
    const thick = Math.max(3, high * 0.2);
    for (const [, , , start, stop] of those) {
      if (stop >= zoom.from && start <= zoom.to) context.fillRect(within(start), y + high - thick, Math.max(0.7, within(stop) - within(start)), thick);
    }
  }

  function drawTransfers(context) {
    const shown = time.transfers.filter(([, , start, stop]) => stop >= zoom.from && start <= zoom.to);
    if (shown.length > 600) return; // too dense to be told apart: seen after zooming in
    context.strokeStyle = css("time-wire");
    context.fillStyle = css("time-wire");
    context.lineWidth = 1;
    for (const [source, target, start, stop] of shown) {
      const [x1, x2] = [x(start), Math.max(x(stop), x(start))];
      const down = target > source;
      const [y1, y2] = [top(source) + (down ? high : 0), top(target) + (down ? 0 : high)];
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

  function ticks(context) {
    const span = zoom.to - zoom.from;
    const raw = span / Math.max(2, Math.floor(wide / 110));
    const power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((one) => one >= raw);
    for (let at = Math.ceil(zoom.from / tick) * tick; at <= zoom.to + tick / 1e6; at += tick) {
      context.fillStyle = css("line");
      context.fillRect(x(at), 15, 1, 6);
      write(context, time.unit === "seconds" ? secondsText(at) : `${+at.toPrecision(3)}`, x(at), 8, { colour: css("muted"), align: at > zoom.from + span * 0.96 ? "right" : at ? "center" : "left", size: 10 });
    }
  }

  /** The same object for the same slot, so that a picture knows that it is pointed at still. */
  const known = new Map();
  function same(line, slot) {
    const key = `${line}/${slot}`;
    if (!known.has(key)) known.set(key, { line, slot });
    return known.get(key);
  }

  function under(px, py) {
    const line = Math.floor((py - 22) / (high + 6));
    if (line < 0 || line >= time.lines.length || px < left) return null;
    const slot = time.lines[line].slots.findIndex(([start, stop]) => px >= x(start) && px <= x(stop));
    return slot < 0 ? null : same(line, slot);
  }

  function about({ line, slot }) {
    const [start, stop, what, stage, microbatch, part] = time.lines[line].slots[slot];
    const of = microbatch < 0 ? "" : ` of microbatch ${microbatch}${time.lines.length > 1 ? `, stage ${stage}` : ""}`;
    const lines = [`${time.whats[what]}${of}`, `${amountText(stop - start)}, from ${amountText(start)} on`];
    for (const [name, amount] of Object.entries(time.parts[part])) lines.push(`${name}: ${amountText(amount)}`);
    const moved = exchanges[line].filter(([, , , from, to]) => from < stop && to > start);
    for (const [, axis, kind, from, to, bytes] of moved.slice(0, 4)) lines.push(`${kind} over ${axis}: ${sizeText(bytes)}, ${amountText(to - from)}`);
    if (moved.length > 4) lines.push(`and ${plural(moved.length - 4, "more collective")}`);
    const sent = time.transfers.filter(([source, , begins, , , m]) => source === line && m === microbatch && begins >= stop - 1e-9 * time.length && begins <= stop + time.length * 1e-3);
    for (const [, target, begins, ends, way, , bytes] of sent.slice(0, 2)) {
      const size = bytes >= 0 ? `${sizeText(bytes)}, ` : "";
      lines.push(`then sends ${way === "forward" ? "values" : "gradients"} to stage ${time.lines[target].stages.join(", ")}${time.unit === "seconds" ? ` (${size}${secondsText(ends - begins)})` : ""}`);
    }
    return lines;
  }

  function next(item, key) {
    if (item === null) return same(Math.max(0, here()), 0);
    const { line, slot } = item;
    if (key === "left" || key === "right") return same(line, Math.max(0, Math.min(time.lines[line].slots.length - 1, slot + (key === "left" ? -1 : 1))));
    const other = Math.max(0, Math.min(time.lines.length - 1, line + (key === "up" ? -1 : 1)));
    const middle = (time.lines[line].slots[slot][0] + time.lines[line].slots[slot][1]) / 2;
    const near = time.lines[other].slots.map(([start, stop], i) => [Math.abs((start + stop) / 2 - middle), i]).sort((a, b) => a[0] - b[0])[0][1];
    return same(other, near);
  }

  const canvas = picture(`${label}. Left and right arrows move from slot to slot, up and down from stage to stage.`, {
    height: () => top(time.lines.length) + 6,
    draw, hit: under, say: about, step: next,
    where: ({ line, slot }) => {
      const [start, stop] = time.lines[line].slots[slot];
      return { x: x((start + stop) / 2), y: top(line) + high / 2 };
    },
  });
  zoom.paint.push(canvas.paint);
  return canvas;
}

/** The same in words. */
function timeTable(time) {
  const amountText = (amount) => (time.unit === "seconds" ? secondsText(amount) : `${+amount.toPrecision(3)} forwards`);
  const rows = time.lines.flatMap((line) => line.slots.slice(0, 200).map(([start, stop, what, stage, microbatch]) => [microbatch < 0 ? line.stages.join(", ") : String(stage), time.whats[what], microbatch < 0 ? "–" : String(microbatch), amountText(start), amountText(stop - start)]));
  return table("What each stage does when", ["stage", "what", "microbatch", "begins", "takes"], rows.slice(0, 1000), [3, 4]);
}

/** What the colours of timelines mean. */
function timeLegend(times) {
  const kinds = [...new Set(times.flatMap((time) => time.lines.flatMap((line) => line.slots.map((slot) => time.whats[slot[2]]))))];
  const parts = [...new Set(times.flatMap((time) => time.parts.flatMap((one) => Object.keys(one))))];
  const together = new Map(); // what has one colour stands together
  for (const what of kinds) together.set(whatColour(what), [...(together.get(whatColour(what)) ?? []), what]);
  const entries = [...together].map(([colour, whats]) => [colour, whats.join(", ")]);
  if (parts.includes("host")) entries.push([css("time-host"), "host time within it"]);
  const wire = [];
  if (times.some((time) => time.exchanges.length)) wire.push("communication within it");
  else if (parts.some((part) => part.startsWith("communication"))) wire.push("exposed communication within it");
  if (times.some((time) => time.transfers.length)) wire.push(wire.length ? "lines: sends to another stage" : "sends to another stage");
  if (wire.length) entries.push([css("time-wire"), wire.join("; ")]);
  return entries;
}
