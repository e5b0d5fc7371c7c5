// Replay of flows and rates, with a slider.

/**
 * @typedef {View & {
 *   kind: "replay", end: "rank" | "node", num_ends: number, end_gbs: number, total_us: number, src: number[],
 *   dst: number[], begin_us: number[], end_us: number[], gbs: number[], step_us: number, sends_gbs: number[][],
 *   receives_gbs: number[][]
 * }} ReplayView
 */

/** @typedef {{sends: number[], receives: number[], flows: number[], total: number}} Moment rates in GB/s */

/**
 * Return what is in flight at a time.
 * @param {ReplayView} view @param {number} at microseconds
 * @returns {Moment}
 */
function momentOf(view, at) {
  if (!view.src.length && view.sends_gbs.length) {
    const i = Math.min(view.sends_gbs.length - 1, Math.floor(at / view.step_us));
    const sends = view.sends_gbs[i];
    return { sends, receives: view.receives_gbs[i], flows: [], total: sum(sends) };
  }
  const [sends, receives] = [range(view.num_ends).fill(0), range(view.num_ends).fill(0)];
  /** @type {number[]} */
  const flows = [];
  for (let i = 0; i < view.src.length; i++) {
    if (view.begin_us[i] > at || at >= view.end_us[i]) continue;
    flows.push(i);
    sends[view.src[i]] += view.gbs[i];
    receives[view.dst[i]] += view.gbs[i];
  }
  return { sends, receives, flows, total: sum(sends) };
}

/** Return the rate of all ends together over time, as steps. @param {ReplayView} view @returns {[number, number][]} */
function totals(view) {
  if (!view.src.length) return view.sends_gbs.map((rates, i) => [i * view.step_us, sum(rates)]);
  /** @type {Map<number, number>} */
  const changes = new Map();
  const add = (/** @type {number} */ at, /** @type {number} */ rate) => changes.set(at, (changes.get(at) ?? 0) + rate);
  for (let i = 0; i < view.src.length; i++) {
    add(view.begin_us[i], view.gbs[i]);
    add(view.end_us[i], -view.gbs[i]);
  }
  let rate = 0;
  return [...changes].sort((a, b) => a[0] - b[0]).map(([at, change]) => [at, (rate += change)]);
}

const MAX_ENDS = 40; // of lines between senders and receivers; with more, bars only

/** @param {ReplayView} view */
function drawReplay(view) {
  const steps = totals(view);
  const limit = view.end_gbs * view.num_ends;
  let at = view.total_us * 0.3;
  let moment = momentOf(view, at);
  const isLines = view.num_ends <= MAX_ENDS && view.src.length > 0;
  const scene = isLines ? linesScene(view, () => moment) : barsScene(view, () => moment);
  const profile = profileOf(view, steps, limit, () => at);
  const id = `time-${view.anchor}`;
  const slider = el("input", { type: "range", id, min: 0, max: 500, step: 1, value: 150 });
  const now = el("output", { class: "now", for: id, "aria-live": "off" });
  const show = () => {
    at = (view.total_us * Number(slider.value)) / 500;
    moment = momentOf(view, at);
    const what = view.src.length
      ? `${digits(moment.flows.length)} flow${moment.flows.length === 1 ? "" : "s"}`
      : `${digits(moment.sends.filter((rate) => rate > 0).length)} ${view.end}s send`;
    const text = `${time(at)}, ${what}, ${short(moment.total)} GB/s`;
    slider.setAttribute("aria-valuetext", text);
    now.textContent = text;
    scene.canvas.setAttribute("aria-label", `At ${text}, of ${digits(limit)} GB/s`);
    scene.redraw();
    profile.redraw();
  };
  slider.addEventListener("input", show);
  const closed = numbers(view, "Flows, or rates of senders over time", () => replayTable(view));
  show();
  return [
    now,
    scene.box,
    profile.box,
    el("div", { class: "controls" }, playButton(slider, show), el("label", { for: id }, "Time"), slider),
    closed,
  ];
}

/**
 * The rate of all ends over time, with a mark at this moment.
 * @param {ReplayView} view @param {[number, number][]} steps @param {number} limit @param {() => number} now
 */
function profileOf(view, steps, limit, now) {
  const highest = digits(most(steps.map((step) => step[1])));
  const name = `Rate of all ${view.end}s over time, at most ${highest} of ${digits(limit)} GB/s`;
  return picture(
    name,
    () => 84,
    (context, width) => {
      const x = (/** @type {number} */ when) => (width * when) / view.total_us;
      const y = (/** @type {number} */ rate) => 80 - (60 * rate) / (limit || 1);
      context.fillStyle = colour("accent-soft");
      context.beginPath();
      context.moveTo(0, 80);
      steps.forEach(([begin, rate], i) => {
        if (!i) context.lineTo(x(begin), 80);
        context.lineTo(x(begin), y(rate));
        context.lineTo(x(steps[i + 1]?.[0] ?? view.total_us), y(rate));
      });
      context.lineTo(width, 80);
      context.fill();
      line(context, 0, 80.5, width, 80.5, colour("rule"));
      line(context, 0, y(limit), width, y(limit), colour("rule"), 1, [3, 3]);
      write(context, `all ${view.end}s: ${digits(limit)} GB/s`, width, 9, "right");
      line(context, x(now()), 0, x(now()), 82, colour("over"), 2);
    },
  );
}

/** @param {HTMLInputElement} slider @param {() => void} show */
function playButton(slider, show) {
  const button = el("button", { type: "button" }, isStill.matches ? "Step" : "Play");
  let frame = 0;
  const stop = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    button.textContent = "Play";
  };
  const advance = () => {
    if (Number(slider.value) >= Number(slider.max)) return stop();
    slider.value = String(Number(slider.value) + 1);
    show();
    frame = requestAnimationFrame(advance);
  };
  button.addEventListener("click", () => {
    if (frame) return stop();
    if (Number(slider.value) >= Number(slider.max)) slider.value = "0";
    if (isStill.matches) {
      slider.value = String(Number(slider.value) + 10);
      return show();
    }
    button.textContent = "Pause";
    frame = requestAnimationFrame(advance);
  });
  return button;
}

/**
 * Senders on the left, receivers on the right, a line for each flow.
 * @param {ReplayView} view @param {() => Moment} now
 */
function linesScene(view, now) {
  const tall = Math.max(15, Math.min(30, 420 / view.num_ends));
  return picture(
    "",
    () => tall * view.num_ends + 24,
    (context, width) => {
      const { sends, receives, flows } = now();
      const arm = Math.min(150, width * 0.2);
      const [left, right] = [44 + arm, width - 44 - arm];
      const y = (/** @type {number} */ i) => 22 + (i + 0.5) * tall;
      write(context, "senders", left, 8, "right");
      write(context, "receivers", right, 8);
      for (const i of flows) {
        context.strokeStyle = hueOf(view.dst[i], view.num_ends);
        context.lineWidth = Math.max(1.5, (tall * 0.42 * view.gbs[i]) / view.end_gbs);
        context.beginPath();
        context.moveTo(left + 6, y(view.src[i]));
        const bend = (right - left) * 0.45;
        context.bezierCurveTo(left + bend, y(view.src[i]), right - bend, y(view.dst[i]), right - 6, y(view.dst[i]));
        context.stroke();
      }
      const [rail, accent] = [colour("grid"), colour("accent")];
      for (let i = 0; i < view.num_ends; i++) {
        const bar = tall * 0.56;
        const [out, in_] = [sends[i], receives[i]].map((rate) => arm * Math.min(1, rate / view.end_gbs));
        context.fillStyle = rail;
        context.fillRect(left - arm, y(i) - bar / 2, arm, bar);
        context.fillRect(right, y(i) - bar / 2, arm, bar);
        context.fillStyle = accent;
        context.fillRect(left - out, y(i) - bar / 2, out, bar);
        context.fillStyle = hueOf(i, view.num_ends);
        context.fillRect(right, y(i) - bar / 2, in_, bar);
        write(context, String(i), left - arm - 8, y(i), "right");
        write(context, String(i), right + arm + 8, y(i));
      }
    },
  );
}

/** What each end sends, up, and receives, down. @param {ReplayView} view @param {() => Moment} now */
function barsScene(view, now) {
  const made = picture(
    "",
    () => 250,
    (context, width) => {
      const { sends, receives } = now();
      const room = width - 60;
      const cell = room / view.num_ends;
      const scale = 105 / view.end_gbs;
      context.fillStyle = colour("grid");
      context.fillRect(0, 10, room, 210);
      context.fillStyle = colour("accent");
      const wide = Math.max(0.75, cell - (cell > 4 ? 1 : 0));
      for (let i = 0; i < view.num_ends; i++) {
        context.fillRect(i * cell, 115 - sends[i] * scale, wide, sends[i] * scale);
        context.fillRect(i * cell, 115, wide, receives[i] * scale);
      }
      line(context, 0, 115, room, 115, colour("card"), 2);
      write(context, "sends", room + 8, 104);
      write(context, "receives", room + 8, 127);
      write(context, `${digits(view.end_gbs)} GB/s`, room + 4, 16);
      const step = labelStep(cell, 8, 44);
      for (let i = 0; i < view.num_ends; i += step) write(context, `${view.end} ${i}`, i * cell, 233);
    },
  );
  explain(made.canvas, (x) => {
    const i = Math.floor((x * view.num_ends) / (made.box.clientWidth - 60));
    const { sends, receives } = now();
    return sends[i] === undefined
      ? ""
      : `${view.end} ${i}\nsends ${digits(sends[i])} GB/s\nreceives ${digits(receives[i])} GB/s`;
  });
  return made;
}

/** @param {ReplayView} view */
function replayTable(view) {
  if (view.src.length) {
    return {
      head: ["from", "to", "GB/s", "begins, us", "ends, us"],
      rows: range(view.src.length).map((i) => [
        `${view.end} ${view.src[i]}`,
        `${view.end} ${view.dst[i]}`,
        figure(view.gbs[i]),
        figure(view.begin_us[i]),
        figure(view.end_us[i]),
      ]),
    };
  }
  return {
    head: ["from, us", "all, GB/s", "busiest sends", "busiest receives"],
    rows: view.sends_gbs.map((rates, i) => [
      digits(Number((i * view.step_us).toPrecision(4))),
      figure(sum(rates)),
      figure(most(rates)),
      figure(most(view.receives_gbs[i])),
    ]),
  };
}
