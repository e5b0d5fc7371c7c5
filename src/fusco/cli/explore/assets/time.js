// What happens when: spans on lanes.

/**
 * @typedef {View & {
 *   kind: "timeline", lanes: string[], kinds: string[], total_us: number, bound_us: number, marks_us: number[],
 *   of_lane: number[], of_kind: number[], begin_us: number[], end_us: number[], peer: number[]
 * }} TimelineView
 */

const LABELS = 62; // pixels of the names of lanes

const TOP = 14;

/** Sizes of a timeline in pixels. @param {TimelineView} view */
function layoutOf(view) {
  const rows = view.kinds.length;
  const lane = Math.max(4, Math.min(rows > 1 ? 34 : 22, (rows > 1 ? 760 : 560) / view.lanes.length));
  const gap = lane > 10 ? 3 : lane > 6 ? 1 : 0;
  const tall = lane * view.lanes.length;
  const hasPeers = rows === 1 && view.peer.some((peer) => peer >= 0);
  return { lane, bar: (lane - gap) / rows, bottom: TOP + tall, hasPeers };
}

/** @param {TimelineView} view */
function drawTimeline(view) {
  const layout = layoutOf(view);
  const spans = `${digits(view.of_lane.length)} spans of ${view.kinds.join(", ")} on ${view.lanes.length} lanes`;
  const name = `${spans} in ${time(view.total_us)}; the busiest link alone needs ${time(view.bound_us)}`;
  const made = picture(
    name,
    () => layout.bottom + 26,
    (context, width) => {
      const x = (/** @type {number} */ at) => LABELS + ((width - LABELS - 14) * at) / view.total_us;
      drawTimeAxis(context, view, layout, x, width > 600 ? 8 : 4);
      drawSpans(context, view, layout, x);
      if (!view.bound_us) return;
      line(context, x(view.bound_us), 2, x(view.bound_us), layout.bottom, colour("over"), 1.5, [4, 3]);
      write(context, "bound", x(view.bound_us) - 5, 8, "right", colour("over-text"));
    },
  );
  explain(made.canvas, (x, y) => spanAt(view, layout, (x - LABELS) / (made.box.clientWidth - LABELS - 14), y - TOP));
  const kinds = view.kinds.map((kind, i) => swatch(kind, `background: ${hueOf(i, view.kinds.length)}`));
  const colours = layout.hasPeers ? [el("span", {}, "a colour and number for each receiver")] : kinds;
  const legend = el("p", { class: "legend" }, ...colours);
  if (view.marks_us.length) legend.append(el("span", {}, `${digits(view.marks_us.length)} stages begin at the marks`));
  return [made.box, legend, numbers(view, "Spans, in the order of the JSON", () => timelineTable(view))];
}

/**
 * @param {CanvasRenderingContext2D} context @param {TimelineView} view @param {ReturnType<typeof layoutOf>} layout
 * @param {(at: number) => number} x @param {number} count of ticks
 */
function drawTimeAxis(context, view, layout, x, count) {
  for (const tick of ticks(view.total_us, count)) {
    line(context, x(tick), TOP, x(tick), layout.bottom, colour("grid"));
    write(context, tick ? time(tick) : "0", x(tick), layout.bottom + 13, "center");
  }
  const marks = view.marks_us.length < 60 ? view.marks_us : [];
  for (const mark of marks) line(context, x(mark), TOP - 5, x(mark), TOP, colour("muted"));
  const step = labelStep(layout.lane, 1, 15);
  for (let i = 0; i < view.lanes.length; i += step)
    write(context, view.lanes[i], LABELS - 8, TOP + (i + 0.5) * layout.lane, "right");
}

/**
 * @param {CanvasRenderingContext2D} context @param {TimelineView} view @param {ReturnType<typeof layoutOf>} layout
 * @param {(at: number) => number} x
 */
function drawSpans(context, view, { lane, bar, hasPeers }, x) {
  const count = hasPeers ? view.lanes.length : view.kinds.length;
  const inks = range(count).map((i) => hueOf(i, count));
  const inBar = colour("card");
  for (let i = 0; i < view.of_lane.length; i++) {
    const from = x(view.begin_us[i]);
    const wide = Math.max(0.6, x(view.end_us[i]) - from);
    const y = TOP + view.of_lane[i] * lane + view.of_kind[i] * bar;
    context.fillStyle = inks[hasPeers ? view.peer[i] : view.of_kind[i]];
    context.fillRect(from, y, wide > 3 ? wide - 0.75 : wide, Math.max(bar - (bar > 4 ? 0.5 : 0), 0.75));
    if (hasPeers && wide > 20 && bar > 12)
      write(context, String(view.peer[i]), from + wide / 2, y + bar / 2 + 0.5, "center", inBar);
  }
}

/**
 * Say what is at a share of the time, and so many pixels below the first lane.
 * @param {TimelineView} view @param {ReturnType<typeof layoutOf>} layout @param {number} share @param {number} y
 */
function spanAt(view, { lane, bar }, share, y) {
  const at = share * view.total_us;
  const [row, kind] = [Math.floor(y / lane), Math.floor((y % lane) / bar)];
  const i = view.of_lane.findIndex(
    (of, j) => of === row && view.of_kind[j] === kind && view.begin_us[j] <= at && at < view.end_us[j],
  );
  if (i < 0) return "";
  const to = view.peer[i] >= 0 ? ` to ${view.lanes[view.peer[i]]}` : "";
  const when = `${time(view.begin_us[i])} to ${time(view.end_us[i])}`;
  return `${view.lanes[row]}${to}\n${view.kinds[kind]}, ${when}`;
}

/** @param {TimelineView} view */
function timelineTable(view) {
  return {
    head: ["lane", "what", "to", "begins, us", "ends, us"],
    rows: range(view.of_lane.length).map((i) => [
      view.lanes[view.of_lane[i]],
      view.kinds[view.of_kind[i]],
      view.peer[i] >= 0 ? view.lanes[view.peer[i]] : "-",
      figure(view.begin_us[i]),
      figure(view.end_us[i]),
    ]),
  };
}
