// Times of systems over the number of nodes, of tokens, or the skew.

/** @typedef {{name: string, ms: (number | null)[]}} Series */
/** @typedef {View & {kind: "sweep", axis: string, places: number[], series: Series[]}} SweepView */

const PLOT = { left: 46, right: 92, top: 16, height: 320, bottom: 34 };

/** @param {SweepView} view */
function drawSweep(view) {
  const known = view.series.flatMap((series) => series.ms.map((ms) => ms ?? 0));
  const largest = most(known) * 1.06;
  const { places, series } = view;
  const ends = series.map(({ name, ms }) => `${name} ${digits(ms.findLast((each) => each !== null) ?? 0)}`);
  const between = `${digits(places[0])} to ${digits(places[places.length - 1])} ${view.axis}`;
  const floor = PLOT.top + PLOT.height;
  const scale = (/** @type {number} */ place) => (view.axis === "skew" ? place : Math.log(place));
  const distance = (/** @type {number} */ place) => scale(place) - scale(places[0]);
  const share = (/** @type {number} */ place) => distance(place) / distance(places[places.length - 1]);
  const made = picture(
    `Times over ${between}; at the end, in ms: ${ends.join(", ")}`,
    () => floor + PLOT.bottom,
    (context, width) => {
      const room = width - PLOT.left - PLOT.right;
      const x = (/** @type {number} */ place) => PLOT.left + room * share(place);
      const y = (/** @type {number} */ ms) => floor - (PLOT.height * ms) / largest;
      drawSweepAxes(context, view, largest, x, y, width - PLOT.right);
      series.forEach(({ ms }, i) => {
        const points = places.flatMap((place, at) => (ms[at] === null ? [] : [[x(place), y(Number(ms[at]))]]));
        drawCurve(context, points, hueOf(i, series.length), isOwn(series, i) ? 3.5 : 2);
      });
      for (const { i, at } of spreadLabels(
        series.map(({ ms }) => y(ms.findLast((each) => each !== null) ?? 0)),
        16,
      )) {
        const ink = isOwn(series, i) ? colour("ink") : colour("muted");
        write(context, series[i].name, width - PLOT.right + 20, at, "left", ink);
        context.fillStyle = hueOf(i, series.length);
        context.fillRect(width - PLOT.right + 9, at - 4, 8, 8);
      }
    },
  );
  explain(made.canvas, (pointer) => {
    const pointed = (pointer - PLOT.left) / (made.box.clientWidth - PLOT.left - PLOT.right);
    const distances = places.map((place) => Math.abs(share(place) - pointed));
    const at = distances.indexOf(Math.min(...distances));
    const times = series.map(({ name, ms }) => `${name} ${ms[at] === null ? "-" : `${digits(Number(ms[at]))} ms`}`);
    return [`${digits(places[at])} ${view.axis}`, ...times].join("\n");
  });
  const closed = numbers(view, `Times in ms over ${view.axis}`, () => ({
    head: [view.axis, ...series.map(({ name }) => name)],
    rows: places.map((place, at) => [
      digits(place),
      ...series.map(({ ms }) => (ms[at] === null ? "-" : figure(Number(ms[at])))),
    ]),
  }));
  return [made.box, closed];
}

/** @param {Series[]} series @param {number} i */
function isOwn(series, i) {
  return series[i].name === "fusco";
}

/**
 * @param {CanvasRenderingContext2D} context @param {SweepView} view @param {number} largest
 * @param {(place: number) => number} x @param {(ms: number) => number} y @param {number} right
 */
function drawSweepAxes(context, view, largest, x, y, right) {
  for (const tick of ticks(largest, 6)) {
    line(context, PLOT.left, y(tick), right, y(tick), colour(tick ? "grid" : "rule"));
    write(context, digits(tick), PLOT.left - 8, y(tick), "right");
  }
  write(context, "ms", PLOT.left - 8, 6, "right");
  let free = -Infinity; // where the last label ends
  for (const place of view.places) {
    const half = context.measureText(digits(place)).width / 2 + 5;
    line(context, x(place), y(0), x(place), y(0) + 4, colour("muted"));
    if (x(place) - half < free) continue;
    write(context, digits(place), x(place), y(0) + 13, "center");
    free = x(place) + half;
  }
  write(context, view.axis, right + PLOT.right, y(0) + 13, "right");
}

/** @param {CanvasRenderingContext2D} context @param {number[][]} points @param {string} ink @param {number} width */
function drawCurve(context, points, ink, width) {
  context.strokeStyle = context.fillStyle = ink;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
  for (const [x, y] of points) {
    context.beginPath();
    context.arc(x, y, width + 0.8, 0, 2 * Math.PI);
    context.fill();
  }
}

/**
 * Move labels apart, from the lowest up. @param {number[]} heights @param {number} least distance
 * @returns {{i: number, at: number}[]}
 */
function spreadLabels(heights, least) {
  const order = range(heights.length).sort((a, b) => heights[b] - heights[a]);
  let below = Infinity;
  return order.map((i) => {
    below = Math.min(heights[i], below - least);
    return { i, at: below };
  });
}
