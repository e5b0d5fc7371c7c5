// Times: those of a benchmark's variants or of simulated systems, predicted beside measured, constants.

/**
 * @typedef {{
 *   workload: string, variant: string, dispatch_ms: number, combine_ms: number, bound_ms: number | null,
 *   internode_bytes: number | null, lower_bound_bytes: number | null, is_right: boolean,
 *   note: string
 * }} Run
 */
/** @typedef {View & {kind: "runs", machine: string, runs: Run[]}} RunsView */
/** @typedef {{label: string, role: "train" | "test", unit: string, predicted: number, measured: number}} Prediction */
/** @typedef {View & {kind: "predictions", rows: Prediction[]}} PredictionsView */
/** @typedef {{name: string, value: number, source: string, trained: string[]}} Constant */
/** @typedef {View & {kind: "constants", constants: Constant[]}} ConstantsView */

/** @param {RunsView} view */
function drawRuns(view) {
  const workloads = [...new Set(view.runs.map((run) => run.workload))];
  const parts = workloads.map((workload) => {
    const runs = view.runs.filter((run) => run.workload === workload);
    const largest = most(runs.map((run) => run.dispatch_ms + run.combine_ms));
    const list = el("dl", { class: "bars" });
    for (const run of runs) {
      const [dispatch, combine] = [run.dispatch_ms, run.combine_ms].map((ms) => (largest ? (ms / largest) * 100 : 0));
      const total = run.dispatch_ms + run.combine_ms;
      const bar = el(
        "span",
        { class: "bar small", style: `width: calc(${(dispatch + combine) / 100} * (100% - 6em))` },
        el("i", { style: `flex: ${dispatch}` }),
        el("i", { style: `flex: ${combine}` }),
      );
      const name = el("dt", {}, run.variant, ...(run.is_right ? [] : [" ", el("span", { class: "tag bad" }, "wrong")]));
      if (run.note) name.append(el("small", { class: "note" }, run.note));
      list.append(name, el("dd", {}, bar, el("b", {}, `${digits(total)} ms`)));
    }
    return el("div", { style: "margin-bottom: 26px" }, ...(workloads.length > 1 ? [el("h3", {}, workload)] : []), list);
  });
  const legend = el(
    "p",
    { class: "legend" },
    swatch("dispatch", "background: var(--accent)"),
    swatch("combine", "background: var(--accent-soft)"),
    el("span", {}, view.machine),
  );
  const known = (/** @type {number | null} */ value, scale = 1) => (value === null ? "-" : figure(value / scale));
  const closed = numbers(view, "Times and bytes between nodes", () => ({
    head: ["workload", "variant", "dispatch, ms", "combine, ms", "bound, ms", "sent, MB", "least, MB"],
    rows: view.runs.map((run) => [
      run.workload,
      run.variant,
      figure(run.dispatch_ms),
      figure(run.combine_ms),
      known(run.bound_ms),
      known(run.internode_bytes, 1e6),
      known(run.lower_bound_bytes, 1e6),
    ]),
  }));
  return [...parts, legend, closed];
}

/** @param {PredictionsView} view */
function drawPredictions(view) {
  const content = {
    head: ["result", "role", "predicted", "measured", "error"],
    classes: view.rows.map((row) => row.role),
    rows: view.rows.map((row) => [
      row.label,
      row.role === "train" ? "fitted to it" : "held out",
      figure(row.predicted, `${digits(row.predicted)} ${row.unit}`),
      figure(row.measured, `${digits(row.measured)} ${row.unit}`),
      row.measured ? figure(row.predicted / row.measured - 1, errorOf(row)) : "-",
    ]),
  };
  return [open("Predicted beside measured", content)];
}

/** @param {Prediction} row */
function errorOf(row) {
  const error = 100 * (row.predicted / row.measured - 1);
  return `${error < 0 ? "-" : "+"}${Math.abs(error).toFixed(1)} %`;
}

/** @param {ConstantsView} view */
function drawConstants(view) {
  return [
    open("Constants of the cluster", {
      head: ["constant", "value", "fitted to", "source"],
      classes: view.constants.map((each) => (each.trained.length ? "train" : "")),
      rows: view.constants.map((each) => [
        each.name,
        figure(each.value),
        each.trained.join(", ") || "nothing",
        each.source,
      ]),
    }),
  ];
}

/** A table that is always open. @param {string} caption @param {Parameters<typeof table>[1]} content */
function open(caption, content) {
  const made = table(caption, content);
  made.className = "wide";
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
}
