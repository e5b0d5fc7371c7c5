// Rows that experts' ranks compute, by layer, without and with copies of busy experts.

/**
 * @typedef {View & {
 *   kind: "experts", spare_places: number, layers: number[], before: number[][], after: number[][],
 *   ratio_before: number[], ratio_after: number[], copies: number[]
 * }} ExpertsView
 */

/** @param {ExpertsView} view */
function drawExperts(view) {
  const closed = numbers(view, "Busiest rank over the mean, copies, and rows of each rank without copies", () =>
    expertsTable(view),
  );
  if (!view.before.length) return [layerDots(view), expertsLegend([]), closed];
  const means = view.before.map((loads) => sum(loads) / loads.length || 1);
  const places = `${view.spare_places} spare place${view.spare_places === 1 ? "" : "s"} a rank`;
  const ways = [
    { title: "Without copies", rows: view.before, ratios: view.ratio_before },
    { title: `With ${places}`, rows: view.after, ratios: view.ratio_after },
  ].slice(0, view.spare_places ? 2 : 1);
  const loads = ways.map((way) => ({
    ...way,
    loads: way.rows.map((rows, i) => rows.map((each) => each / means[i])),
  }));
  if (view.layers.length === 1) return [oneLayer(loads), closed];
  const largest = most(loads.flatMap((way) => way.loads.map(most)));
  const maps = loads.map((way) => layerMap(view, way.loads, largest, way.title, way.ratios));
  return [
    el("div", { class: maps.length > 1 ? "trio" : "pair" }, ...maps, layerDots(view)),
    expertsLegend([digits(largest / 2), `${digits(largest)} times the mean`]),
    closed,
  ];
}

/**
 * The ranks of a single layer as bars.
 * @param {{title: string, loads: number[][], ratios: number[]}[]} ways
 */
function oneLayer(ways) {
  const largest = most([1, ...ways.map((way) => most(way.loads[0]))]);
  const about = {
    group: 1,
    label: (/** @type {number} */ i) => `rank ${i}`,
    words: /** @type {[string, string]} */ (["computes", ""]),
    bound: "mean",
  };
  const strips = ways.map(({ title, loads, ratios: [ratio] }) => {
    const says = `${title}: the busiest rank has ${digits(ratio)} times the mean`;
    const big = el("span", { class: `big ${ratio > 1.05 ? "over" : ""}` }, ratio.toFixed(2));
    const head = el("header", {}, el("h3", {}, title), big, el("p", {}, "busiest rank over the mean"));
    return el("div", { class: "strip" }, head, strip(says, loads[0], [], 1, [largest, 0], about).box);
  });
  return el("div", {}, ...strips);
}

/** @param {ExpertsView} view */
function expertsTable(view) {
  const hasRanks = view.before.length > 0 && view.before[0].length <= 64;
  const ranks = hasRanks ? range(view.before[0].length).map((rank) => `rank ${rank}`) : [];
  return {
    head: ["layer", "busiest / mean", "with copies", "copies", ...ranks],
    rows: view.layers.map((layer, i) => [
      String(layer),
      ...[view.ratio_before[i], view.ratio_after[i], view.copies[i]].map((value) => figure(value)),
      ...(hasRanks ? view.before[i].map((rows) => figure(rows)) : []),
    ]),
  };
}

/** @param {string[]} strongest what the middle and the strongest colour mean, if there are colours */
function expertsLegend(strongest) {
  const dot = (/** @type {string} */ text, /** @type {string} */ ink) =>
    swatch(text, `background: var(--${ink}); border-radius: 9px`);
  return el(
    "p",
    { class: "legend" },
    ...(strongest.length ? [ramp("0", ...strongest)] : []),
    dot("without copies", "over"),
    dot("with copies", "accent"),
    el("span", {}, strongest.length ? "layers down, ranks across" : "layers down"),
  );
}

/** Pixels of a layer. @param {ExpertsView} view */
function layerHeight(view) {
  return Math.max(6, Math.min(22, 430 / view.layers.length));
}

/** @param {ExpertsView} view @param {CanvasRenderingContext2D} context */
function writeLayers(view, context) {
  const tall = layerHeight(view);
  const step = labelStep(tall, 1, 16);
  for (let i = 0; i < view.layers.length; i += step)
    write(context, String(view.layers[i]), 24, 18 + (i + 0.5) * tall, "right");
}

/**
 * @param {ExpertsView} view
 * @param {number[][]} values @param {number} largest @param {string} title @param {number[]} ratios
 */
function layerMap(view, values, largest, title, ratios) {
  const tall = layerHeight(view);
  const ranks = values[0].length;
  const busiest = `the busiest rank has ${digits(most(ratios))} times the mean`;
  const name = `${title}: rows of ${ranks} ranks in ${values.length} layers; ${busiest}`;
  const map = {
    values,
    share: (/** @type {number} */ value) => value / (largest || 1),
    across: 1,
    down: 1,
    isBlank: () => false,
  };
  const made = picture(
    name,
    () => tall * values.length + 36,
    (context, width) => {
      drawHeatMap(context, map, 30, 18, width - 30, tall * values.length);
      writeLayers(view, context);
      const cell = (width - 30) / ranks;
      const step = labelStep(cell, 1, 30);
      for (let rank = 0; rank < ranks; rank += step)
        write(context, String(rank), 30 + (rank + 0.5) * cell, 18 + tall * values.length + 11, "center");
    },
  );
  explain(made.canvas, (x, y) => {
    const [row, column] = [Math.floor((y - 18) / tall), Math.floor(((x - 30) * ranks) / (made.box.clientWidth - 30))];
    return values[row]?.[column] === undefined
      ? ""
      : `layer ${view.layers[row]}, rank ${column}\n${digits(values[row][column])} times the mean`;
  });
  return el("div", {}, el("h3", {}, title), made.box);
}

/** Two dots a layer: the busiest rank over the mean. @param {ExpertsView} view */
function layerDots(view) {
  const tall = layerHeight(view);
  const count = view.layers.length;
  const largest = most(view.ratio_before) * 1.04;
  const without = `${digits(Math.min(...view.ratio_before))} to ${digits(most(view.ratio_before))} without copies`;
  const name = `Busiest rank over the mean: ${without}, ${digits(most(view.ratio_after))} at most with copies`;
  const made = picture(
    name,
    () => tall * count + 36,
    (context, width) => {
      const x = (/** @type {number} */ ratio) => 30 + ((width - 40) * (ratio - 1)) / Math.max(largest - 1, 0.05);
      writeLayers(view, context);
      for (const tick of ticks(largest - 1, 4)) {
        line(context, x(1 + tick), 18, x(1 + tick), 18 + tall * count, colour("grid"));
        write(context, digits(1 + tick), x(1 + tick), 18 + tall * count + 11, "center");
      }
      const size = Math.min(4.5, tall * 0.4);
      for (let i = 0; i < count; i++) {
        const y = 18 + (i + 0.5) * tall;
        line(context, x(view.ratio_after[i]), y, x(view.ratio_before[i]), y, colour("rule"), 1.5);
        for (const [ratio, ink] of /** @type {[number, string][]} */ ([
          [view.ratio_before[i], "over"],
          [view.ratio_after[i], "accent"],
        ])) {
          context.fillStyle = colour(ink);
          context.beginPath();
          context.arc(x(ratio), y, size, 0, 2 * Math.PI);
          context.fill();
        }
      }
    },
  );
  explain(made.canvas, (_, y) => {
    const i = Math.floor((y - 18) / tall);
    if (view.layers[i] === undefined) return "";
    const [without, copied] = [digits(view.ratio_before[i]), digits(view.ratio_after[i])];
    return `layer ${view.layers[i]}\n${without} without copies\n${copied} with ${digits(view.copies[i])} copies`;
  });
  return el("div", {}, el("h3", {}, "Busiest rank of a layer"), made.box);
}
