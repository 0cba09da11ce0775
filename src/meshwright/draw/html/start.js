// The page begins: the rank in the bar, the parameter that is shown, and the first drawing.

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

// The largest weight that is cut, of those that repeat: what a reader wants to see first.
const weigh = (row) => (row.shape.length > 1 ? 1 : 0) * ((row.tp ? 2 : 0) + (row.count > 1 ? 1 : 0) + (row.tp && row.tp[1].length > 1 ? 1 : 0));
chosen.rank = facts.rank;
chosen.row = facts.row ?? facts.rows.reduce((best, row, i) => (weigh(row) > weigh(facts.rows[best]) ? i : best), 0);
if (facts.rows.length) chosen.variant = Math.max(0, variantOf(facts.rows[chosen.row], chosen.rank));
themed();

// For a person at the console, and for tests.
window.meshwright = { facts, chosen, chooseRank, chooseRow, holds, slicesOf, bytesAt, holders, standsAt, parameterPicture, meshPicture, drawing };
