// Memory: what lives at most in each action and phase of the step, stacked by what it is; the peak is marked.

const KINDS = ["parameters", "unsharded parameters", "gradients", "unreduced gradients", "optimizer", "activations", "temporaries", "communication", "kernels and backends", "batch", "buffers"];
const kindColour = (kind) => css(`kind-${Math.max(0, KINDS.indexOf(kind))}`);
const memory = facts.memory;
const ROLES = 24; // drawn at once

const roleOf = (rank) => memory.roles.findIndex((role) => role.runs.some(([start, stop]) => rank >= start && rank < stop));
const roleRanks = (role) => {
  const count = role.runs.reduce((sum, [start, stop]) => sum + stop - start, 0);
  const [first, last] = [role.runs[0][0], role.runs.at(-1)[1] - 1];
  if (role.runs.length > 1 && count > 8) return `${count} ranks, ${first} … ${last}`;
  if (role.runs.length > 1) return `ranks ${role.runs.flatMap(([start, stop]) => Array.from({ length: stop - start }, (_, i) => start + i)).join(", ")}`;
  return count === 1 ? `rank ${first}` : `ranks ${first}–${last}`;
};

// An action is written stage, kind, microbatch, and of a transfer the other stage: 0F3, 0SEND_F2:1.
const ACTION = /^(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?::(\d+))?$/;
const KIND_WORDS = { F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights", SEND_F: "send of values", RECV_F: "receipt of values", SEND_B: "send of gradients", RECV_B: "receipt of gradients" };
const isTransfer = (what) => /SEND|RECV/.test(what);

/** Whether a rank of this role runs several stages: then each action is told with its stage. */
const severalStages = (role) => (role.several ??= new Set(role.moments.map(([what]) => ACTION.exec(what)?.[1]).filter(Boolean)).size > 1);

function shortName(role, what) {
  const action = ACTION.exec(what);
  return action ? `${severalStages(role) ? action[1] : ""}${action[2]}${action[3]}` : what.startsWith("step") ? "begin" : what;
}

function momentName(role, what) {
  const action = ACTION.exec(what);
  return action ? `${KIND_WORDS[action[2]]}, microbatch ${action[3]}${severalStages(role) ? `, stage ${action[1]}` : ""}` : shortName(role, what);
}

/** Names below the bars, from the left: each that does not touch the one before. */
function drawMoments(role, context, width, y) {
  let free = 0;
  role.moments.forEach(([what], i) => {
    if (isTransfer(what)) return;
    const name = shortName(role, what);
    context.font = `10px ${css("sans")}`;
    const half = context.measureText(name).width / 2;
    const x = Math.max(half, Math.min(width - half, role.left + (i + 0.5) * role.wide));
    if (x - half < free) return;
    write(context, name, x, y, { colour: css("muted"), align: "center", size: 10 });
    free = x + half + 4;
  });
}

function drawRole(role, context, width, height, pointed) {
  const moments = role.moments;
  const most = Math.max(...memory.roles.flatMap((one) => one.moments.map(([, bytes]) => bytes)));
  const [left, right, top, bottom] = [4, 4, 20, 16];
  const wide = (width - left - right) / moments.length;
  const tall = height - top - bottom;
  Object.assign(role, { left, wide });
  moments.forEach(([what, bytes, kinds], i) => {
    let y = top + tall;
    kinds.forEach((amount, k) => {
      const high = (amount / most) * tall;
      y -= high;
      context.fillStyle = kindColour(memory.kinds[k]);
      context.fillRect(left + i * wide, y, Math.max(0.5, wide - (wide > 6 ? 1 : 0)), high);
    });
    if (pointed === i || i === role.peak) {
      context.strokeStyle = css(i === role.peak ? "ink" : "accent");
      context.lineWidth = 1.5;
      context.strokeRect(left + i * wide, y - 0.5, Math.max(1, wide - 1), top + tall - y + 0.5);
    }
    if (i === role.peak) {
      const x = left + (i + 0.5) * wide;
      const align = x > width * 0.8 ? "right" : x < width * 0.2 ? "left" : "center";
      write(context, `▾ peak ${sizeText(bytes)} at ${shortName(role, what)}`, align === "center" ? x : x + (align === "right" ? wide / 2 : -wide / 2), Math.max(9, y - 9), { bold: true, align });
    }
  });
  drawMoments(role, context, width, height - 7);
}

function aboutMoment(role, i) {
  const [what, bytes, kinds] = role.moments[i];
  const parts = kinds.map((amount, k) => [amount, memory.kinds[k]]).filter(([amount]) => amount > 0).sort((a, b) => b[0] - a[0]);
  return [`${role.name}, ${momentName(role, what)}: ${sizeText(bytes)}${i === role.peak ? " (the peak)" : ""}`, ...parts.map(([amount, kind]) => `${kind}: ${sizeText(amount)}`)];
}

function rolePicture(role) {
  return picture(`Memory of ${role.name}, moment by moment. Left and right arrows move from moment to moment.`, {
    height: () => 150,
    draw: (context, width, height, pointed) => drawRole(role, context, width, height, pointed),
    hit: (x, y) => {
      const i = Math.floor((x - role.left) / role.wide);
      return y > 8 && i >= 0 && i < role.moments.length ? i : null;
    },
    say: (i) => aboutMoment(role, i),
    where: (i) => ({ x: role.left + (i + 0.5) * role.wide, y: 60 }),
    step: (i, key) => (i === null ? role.peak : Math.max(0, Math.min(role.moments.length - 1, i + (key === "left" || key === "up" ? -1 : 1)))),
  });
}

function roleFigure(role) {
  const figure = el("figure", { class: "role" }, el("figcaption", {}, el("strong", { text: role.name }), ` ${roleRanks(role)}, at rest ${restText(role)} of weights`, deviceText(role)));
  if (role.moments.length) {
    const drawn = rolePicture(role);
    figure.append(el("div", { class: "canvas" }, drawn), tableBehind("as a table", () => momentTable(role)));
    if (role.sites.length) figure.append(tableBehind("where the activations and temporaries of the peak were made", () => siteTable(role)));
    role.paint = drawn.paint;
  }
  return figure;
}

function deviceText(role) {
  if (!memory.capacity) return null;
  const fits = role.device[1] <= memory.capacity;
  const share = role.device[1] / memory.capacity;
  return el("span", { class: "device" }, bar(Math.min(1, share), fits ? css("good") : css("bad")),
    ` ${sizeText(role.device[1])} of ${sizeText(memory.capacity)} on a device: ${fits ? `fits, ${sizeText(memory.capacity - role.device[1])} left` : `${sizeText(role.device[1] - memory.capacity)} too much`}`);
}

function momentTable(role) {
  const rows = role.moments.slice(0, 400).map(([what, bytes, kinds], i) => [i === role.peak ? `${momentName(role, what)} (peak)` : momentName(role, what), sizeText(bytes), ...kinds.map((amount) => (amount ? sizeText(amount) : "–"))]);
  return table(`Memory of ${role.name}`, ["at", "all", ...memory.kinds], rows, [...memory.kinds.keys()].map((i) => i + 2).concat(1));
}

function siteTable(role) {
  return table("Where they were made", ["module", "line", "function", "bytes"], role.sites.map((site) => [site.module || "–", site.line || "–", site.function, sizeText(site.bytes)]), [3]);
}

/** What the ranks of a role hold at rest: uneven shards may give the last ones less, or nothing. */
const restText = (role) => [...new Set(role.atRest.map(sizeText))].join(" to ");

/** A plan alone knows what lies at rest, and how many microbatches are in flight. */
function restTable() {
  const most = Math.max(...memory.roles.map((role) => role.atRest[1]));
  const rows = memory.roles.slice(0, 256).map((role) => [role.name, roleRanks(role), restText(role), bar(role.atRest[1] / most, kindColour("parameters")), plural(time.lines[role.stage]?.inFlight ?? 1, "microbatch", "microbatches")]);
  return table("Weights at rest, and microbatches in flight", ["role", "ranks", "weights at rest", "", "activations held at most of"], rows, [2]);
}

const shownRoles = [];
document.addEventListener("themed", () => { shownRoles.length = 0; });
views.push(() => {
  const host = byId("memory-roles");
  if (!memory.kinds.length) return host.replaceChildren(restTable());
  byId("memory-legend").replaceChildren(legend(memory.kinds.map((kind) => [kindColour(kind), kind])));
  if (!shownRoles.length) {
    const fullest = memory.roles.map((_, i) => i).sort((a, b) => memory.roles[b].device[1] - memory.roles[a].device[1]).slice(0, ROLES);
    shownRoles.push(...fullest.sort((a, b) => a - b));
    host.replaceChildren(...shownRoles.map((i) => roleFigure(memory.roles[i])));
    if (memory.roles.length > ROLES) host.append(el("p", { class: "muted", text: `${memory.roles.length - ROLES} more roles need no more than these` }));
  }
  const here = roleOf(chosen.rank);
  shownRoles.forEach((i, n) => {
    host.children[n].classList.toggle("here", i === here);
    memory.roles[i].paint?.();
  });
});
