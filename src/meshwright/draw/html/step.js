// The step in time; the terms of a step, plans side by side.

const time = facts.timeline;
const stepZoom = zooming(time.length);
const stepPicture = timePicture(time, "The step in time", stepZoom, () => coordinate(chosen.rank).pp ?? 0);

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
  const verdict = step.capacity ? `${sizeText(step.peak)} live at the peak: ${step.fits ? "fits" : "does not fit"} ${sizeText(step.capacity)}` : "";
  return el("figure", { class: "waterfall" },
    el("figcaption", {}, el("strong", { text: step.name }), ` ${step.mesh} on ${step.hardware}, ${step.source}`,
      el("span", { class: step.fits ? "muted" : "alarm", text: verdict })),
    el("table", {}, el("caption", { class: "unseen", text: `Terms of a step: ${step.name}` }), el("tbody", {}, lines),
      el("tfoot", {}, el("tr", {}, el("th", { scope: "row", text: "a step" }), el("td", { class: "number", text: secondsText(mean) }), el("td", {}),
        el("td", { class: "muted", text: `${secondsText(low)} to ${secondsText(high)}` })))));
}

byId("step-picture").append(stepPicture);
byId("zoom").append(...stepZoom.buttons());
byId("step").append(tableBehind("The step as a table", () => timeTable(time)));
views.push(() => {
  stepPicture.paint();
  const entries = timeLegend([time]);
  if (time.lines.length > 1) entries.push([css("bubble"), `bubble: ${percentText(time.idle)} of the ranks’ time`]);
  byId("step-legend").replaceChildren(legend(entries));
  const longest = Math.max(...facts.steps.map((step) => Math.max(step.seconds[0], Object.values(step.terms).reduce((a, b) => a + b, 0))));
  byId("terms").replaceChildren(...facts.steps.map((step) => waterfall(step, longest)));
});
