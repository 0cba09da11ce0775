// The page begins: the rank in the bar, light and dark, and the first drawing.

const rankField = byId("rank");
rankField.max = world - 1;
rankField.addEventListener("change", () => chooseRank(Number(rankField.value)));
byId("rank-before").addEventListener("click", () => chooseRank(chosen.rank - 1));
byId("rank-after").addEventListener("click", () => chooseRank(chosen.rank + 1));
views.push(() => {
  rankField.value = chosen.rank;
  byId("rank-at").textContent = coordinateText(chosen.rank);
});

const card = document.querySelector("#card-step [data-seconds]");
if (card) card.textContent = secondsText(Number(card.dataset.seconds));

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  memoryColours();
});
dark.addEventListener("change", memoryColours);

/** All is drawn anew, in the colours of the theme. */
function memoryColours() {
  byId("theme").setAttribute("aria-pressed", String(theme() === "dark"));
  shownRoles.length = 0;
  redraw();
}

addEventListener("beforeprint", () => {
  document.documentElement.dataset.theme = "light";
  memoryColours();
});
// The largest weight that is cut, of those that repeat: what a reader wants to see first.
const weigh = (row) => (row.shape.length > 1 ? 1 : 0) * ((row.tp ? 2 : 0) + (row.count > 1 ? 1 : 0) + (row.tp && row.tp[1].length > 1 ? 1 : 0));
chosen.rank = facts.rank;
chosen.row = facts.row ?? facts.rows.reduce((best, row, i) => (weigh(row) > weigh(facts.rows[best]) ? i : best), 0);
chosen.variant = Math.max(0, variantOf(facts.rows[chosen.row], chosen.rank));
memoryColours();

// For a person at the console, and for tests.
window.meshwright = { facts, chosen, chooseRank, chooseRow, holds, slicesOf, bytesAt, holders, standsAt, parameterPicture, meshPicture, drawing };
