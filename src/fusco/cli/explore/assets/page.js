// Puts the heading and the views on the page.

/** @typedef {CopiesView | MatrixView | LinksView | ExpertsView} PlanView */
/** @typedef {TimelineView | ReplayView | RunsView | SweepView | PredictionsView | ConstantsView | PlanView} AnyView */
/**
 * @typedef {object} PageData
 * @property {string} title
 * @property {string} subtitle
 * @property {Record<string, string>} facts
 * @property {string} origin
 * @property {AnyView[]} views
 */

/** @param {AnyView} view @returns {HTMLElement[]} */
function draw(view) {
  switch (view.kind) {
    case "copies":
      return drawCopies(view);
    case "matrix":
      return drawMatrix(view);
    case "links":
      return drawLinks(view);
    case "experts":
      return drawExperts(view);
    case "timeline":
      return drawTimeline(view);
    case "replay":
      return drawReplay(view);
    case "runs":
      return drawRuns(view);
    case "sweep":
      return drawSweep(view);
    case "predictions":
      return drawPredictions(view);
    case "constants":
      return drawConstants(view);
  }
}

function main() {
  /** @type {PageData} */
  const page = JSON.parse(byId("data").textContent ?? "");
  const facts = Object.entries(page.facts).map(([label, text]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, text)),
  );
  byId("head").append(el("h1", {}, page.title));
  if (page.subtitle) byId("head").append(el("p", {}, page.subtitle));
  if (facts.length) byId("head").append(el("dl", { class: "facts" }, ...facts));
  const links = page.views.map((view) => el("li", {}, el("a", { href: `#${view.anchor}` }, view.question)));
  byId("nav").append(el("ul", {}, ...links));
  byId("foot").append(el("p", {}, page.origin));
  const place = byId("views");
  for (const view of page.views) {
    const title = `${view.anchor}-title`;
    const section = el("section", { class: "view", id: view.anchor, "aria-labelledby": title });
    section.append(
      el("p", { class: "question" }, view.question),
      el("h2", { id: title }, view.title),
      el("p", { class: "reading" }, view.reading),
    );
    place.append(section);
    section.append(...draw(view));
  }
  document.body.append(tip);
}

main();
