// Loads of links with each balancer, and the copies that are avoided.

/** @typedef {{label: string, rows: number}} Bar */
/** @typedef {View & {kind: "copies", bars: Bar[], tokens: number, bytes_per_row: number}} CopiesView */
/**
 * @typedef {{
 *   name: string, is_chosen: boolean, sends: number[], receives: number[], over_bound: number, send_ratio: number,
 *   receive_ratio: number, moved_rows: number
 * }} BalancerLoads
 */
/**
 * @typedef {View & {
 *   kind: "links", ranks_per_node: number, bytes_per_row: number, bound_rows: number, balancers: BalancerLoads[]
 * }} LinksView
 */

/** @param {CopiesView} view */
function drawCopies(view) {
  const largest = most(view.bars.map((bar) => bar.rows));
  const list = el("dl", { class: "bars" });
  view.bars.forEach((bar, i) => {
    const share = largest ? bar.rows / largest : 0;
    const of = ["bar other", "bar", "bar outline"][i];
    const each = view.tokens ? bar.rows / view.tokens : 0;
    list.append(
      el("dt", {}, bar.label),
      el(
        "dd",
        {},
        el("span", { class: of, style: `width: calc(${share} * (100% - 11.5em))` }),
        el(
          "span",
          {},
          el("b", {}, size(bar.rows * view.bytes_per_row)),
          " ",
          el("small", {}, `${digits(each)} a token`),
        ),
      ),
    );
  });
  return [
    list,
    numbers(view, "Rows between nodes in one dispatch", () => ({
      head: ["copies", "rows", "MB", "rows a token"],
      rows: view.bars.map((bar) => [
        bar.label,
        figure(bar.rows),
        figure((bar.rows * view.bytes_per_row) / 1e6),
        figure(bar.rows / (view.tokens || 1)),
      ]),
    })),
  ];
}

/**
 * Bars of loads that go up and, if there are any, down; the part above the bound has another colour.
 * @param {string} name
 * @param {number[]} up @param {number[]} down empty for none
 * @param {number} bound
 * @param {[number, number]} largest up and down, in all strips
 * @param {{group: number, label: (i: number) => string, words: [string, string], bound: string,
 *   choose?: (i: number) => void}} about
 */
function strip(name, up, down, bound, largest, about) {
  const scale = (down.length ? 126 : 72) / (largest[0] + largest[1] || 1);
  const left = 4;
  const middle = 8 + largest[0] * scale;
  const arm = largest[1] * scale;
  const made = picture(
    name,
    () => middle + arm + 26,
    (context, width) => {
      const room = width - left - 56;
      const together = Math.ceil(up.length / room); // bars of a pixel
      const cell = (room * together) / up.length;
      const gap = cell > 6 ? Math.min(3, cell * 0.2) : cell > 2.5 ? 0.5 : 0;
      const [accent, over] = [colour("accent"), colour("over")];
      const draw = (/** @type {number[]} */ values, /** @type {number} */ sign) => {
        for (let i = 0; i < values.length; i++) {
          const within = Math.min(values[i], bound) * scale;
          const above = Math.max(0, values[i] - bound) * scale;
          const x = left + i * cell;
          const wide = Math.max(cell - gap, 0.75);
          context.fillStyle = accent;
          context.fillRect(x, sign > 0 ? middle - within : middle + 1, wide, within);
          context.fillStyle = over;
          if (above > 0.3) context.fillRect(x, sign > 0 ? middle - within - above : middle + 1 + within, wide, above);
        }
      };
      draw(busiestOf(up, together), 1);
      draw(busiestOf(down, together), -1);
      const ink = colour("ink");
      line(context, left, middle + 0.5, left + room, middle + 0.5, colour("rule"));
      line(context, left, middle - bound * scale, left + room, middle - bound * scale, ink, 1.25);
      if (down.length)
        line(context, left, middle + 1 + bound * scale, left + room, middle + 1 + bound * scale, ink, 1.25);
      write(context, about.bound, left + room + 6, middle - bound * scale, "left", ink);
      if (down.length) {
        if (bound * scale > 20) write(context, about.words[0], left + room + 6, middle - 7);
        if (bound * scale > 20) write(context, about.words[1], left + room + 6, middle + 9);
      }
      const bottom = middle + arm + 14;
      const step = labelStep(cell, about.group, 58);
      for (let i = 0; i * together < up.length; i += step)
        write(context, about.label(i * together), left + i * cell, bottom);
    },
  );
  const barAt = (/** @type {number} */ x) => Math.floor(((x - left) * up.length) / (made.box.clientWidth - left - 56));
  const { choose } = about;
  if (choose) {
    made.box.classList.add("picks");
    made.canvas.addEventListener("click", (event) => choose(barAt(event.offsetX)));
  }
  explain(made.canvas, (x) => {
    const i = barAt(x);
    if (!(i >= 0 && i < up.length)) return "";
    const said = [[about.words[0], up[i]], ...(down.length ? [[about.words[1], down[i]]] : [])];
    const lines = said.map(([word, value]) => `${word} ${short(Number(value) / bound)} of the ${about.bound}`);
    return [about.label(i), ...lines].join("\n");
  });
  return made;
}

const MAX_RANKS = 256; // of a strip: with more, a bar is the busiest rank of a node

/** @param {LinksView} view */
function drawLinks(view) {
  const ranks = view.balancers[0].sends.length;
  const nodes = ranks / view.ranks_per_node;
  const [up, down] = ["sends", "receives"].map((way) =>
    most([view.bound_rows, ...view.balancers.map((each) => most(each[/** @type {"sends" | "receives"} */ (way)]))]),
  );
  const isNodes = ranks > MAX_RANKS;
  const node = isNodes ? nodeField(nodes, "Ranks of node") : null;
  const list = el("div");
  const show = () => {
    const chosen = node ? node.choose() : -1;
    const first = chosen < 0 ? 0 : chosen * view.ranks_per_node;
    list.replaceChildren(
      ...view.balancers.map((each) => {
        const ofNode = (/** @type {number[]} */ loads) => loads.slice(first, first + view.ranks_per_node);
        const pick =
          chosen >= 0
            ? ofNode
            : isNodes
              ? (/** @type {number[]} */ loads) => busiestOf(loads, view.ranks_per_node)
              : (/** @type {number[]} */ loads) => loads;
        const what = chosen < 0 && isNodes ? "node" : "rank";
        const about = {
          group: what === "rank" && chosen < 0 ? view.ranks_per_node : 1,
          label: (/** @type {number} */ i) => `${what} ${first + i}`,
          words: /** @type {[string, string]} */ (["sends", "receives"]),
          bound: "bound",
          choose: what === "node" ? chooseNode : undefined,
        };
        return loadStrip(view, each, pick(each.sends), pick(each.receives), [up, down], about);
      }),
    );
  };
  /** @param {number} i */
  function chooseNode(i) {
    if (!node || i < 0 || i >= nodes) return;
    node.input.value = String(i);
    show();
  }
  show();
  node?.input.addEventListener("input", show);
  const legend = el(
    "p",
    { class: "legend" },
    swatch("up to the bound", "background: var(--accent)"),
    swatch("above it", "background: var(--over)"),
  );
  if (view.bound_rows)
    legend.append(
      swatch(`bound: ${digits(view.bound_rows)} rows, ${size(view.bound_rows * view.bytes_per_row)}`, "", "line"),
    );
  if (isNodes) legend.append(el("span", {}, "a bar is the busiest rank of its node"));
  const summary = el("div", {}, legend, ...(node ? [node.field] : []));
  return [list, summary, numbers(view, "Rows of each rank between nodes", () => linksTable(view))];
}

/**
 * @param {LinksView} view @param {BalancerLoads} of
 * @param {number[]} up @param {number[]} down @param {[number, number]} largest
 * @param {Parameters<typeof strip>[5]} about
 */
function loadStrip(view, of, up, down, largest, about) {
  const busiest = of.over_bound;
  const [sender, receiver] = [digits(of.send_ratio), digits(of.receive_ratio)];
  const says = `${of.name}: the busiest sender has ${sender} of the bound, the busiest receiver ${receiver}`;
  const title = el("h3", {}, of.name, " ", ...(of.is_chosen ? [el("span", { class: "tag" }, "in use")] : []));
  const moved = of.moved_rows ? `; moves ${digits(of.moved_rows)} rows within nodes` : "";
  const ways = of.send_ratio
    ? `sends ${of.send_ratio.toFixed(2)}, receives ${of.receive_ratio.toFixed(2)} of the bound`
    : "busiest rank over the bound";
  const text = `${ways}${moved}`;
  const header = el(
    "header",
    {},
    title,
    el("span", { class: `big ${busiest > 1.02 ? "over" : ""}` }, busiest.toFixed(2)),
    el("p", {}, text),
  );
  const row = el("div", { class: "strip" }, header);
  if (up.length) row.append(strip(says, up, down, view.bound_rows, largest, about).box);
  else row.append(ratioBar(of, Math.max(...view.balancers.map((each) => each.over_bound))));
  return row;
}

/** A bar of the busiest rank alone. @param {BalancerLoads} of @param {number} largest */
function ratioBar(of, largest) {
  const [within, above] = [Math.min(1, of.over_bound), Math.max(0, of.over_bound - 1)];
  const parts = [within, above].map((part, i) =>
    el("i", { style: `flex: ${part}; background: var(--${["accent", "over"][i]})` }),
  );
  return el("span", { class: "bar small", style: `width: ${(100 * of.over_bound) / largest}%` }, ...parts);
}

/** Return the largest of each `count` consecutive loads. @param {number[]} loads @param {number} count */
function busiestOf(loads, count) {
  return range(Math.ceil(loads.length / count)).map((i) => most(loads.slice(i * count, (i + 1) * count)));
}

/** @param {LinksView} view */
function linksTable(view) {
  if (!view.balancers[0].sends.length) {
    const known = (/** @type {number} */ ratio) => (ratio ? figure(ratio) : "-");
    return {
      head: ["balancer", "busiest over the bound", "sends", "receives"],
      rows: view.balancers.map((each) => [
        each.name,
        figure(each.over_bound),
        known(each.send_ratio),
        known(each.receive_ratio),
      ]),
    };
  }
  const all = [
    "busiest over the bound",
    ...view.balancers.flatMap((each) => [figure(each.send_ratio), figure(each.receive_ratio)]),
  ];
  const ranks = range(view.balancers[0].sends.length).map((rank) => [
    String(rank),
    ...view.balancers.flatMap((each) => [figure(each.sends[rank]), figure(each.receives[rank])]),
  ]);
  return {
    head: ["rank", ...view.balancers.flatMap((each) => [`${each.name} sends`, "receives"])],
    rows: [all, ...ranks],
  };
}
