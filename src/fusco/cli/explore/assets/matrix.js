// Heat maps: traffic between ranks or nodes before and after deduplication, and the ranks of a node.

/**
 * @typedef {View & {
 *   kind: "matrix", cell: "rank" | "node", nodes_per_cell: number, ranks_per_node: number, bytes_per_row: number,
 *   before: number[][], after: number[][], ranks_before: number[][], ranks_after: number[][]
 * }} MatrixView
 */
/**
 * @typedef {object} HeatMap
 * @property {number[][]} values
 * @property {(value: number) => number} share of the strongest colour, from 0 to 1
 * @property {number} across cells of a group, between which a line is drawn; 1 for none
 * @property {number} down
 * @property {(row: number, column: number) => boolean} isBlank cells that have no value
 */

const EDGE = { left: 40, top: 34, gap: 6, bars: 38, bottom: 16 };

/**
 * Draw cells into a rectangle: with gaps if they are large enough, without if they are smaller than pixels.
 * @param {CanvasRenderingContext2D} context
 * @param {HeatMap} map
 * @param {number} x @param {number} y @param {number} width @param {number} height
 */
function drawHeatMap(context, map, x, y, width, height) {
  const rows = map.values.length;
  const columns = map.values[0]?.length ?? 0;
  if (!rows || !columns) return;
  const image = new ImageData(columns, rows);
  const colours = range(256).map((i) => heat(i / 255));
  map.values.forEach((values, row) => {
    for (let column = 0; column < columns; column++) {
      const at = 4 * (row * columns + column);
      image.data.set(colours[Math.round(255 * Math.min(1, map.share(values[column])))], at);
      image.data[at + 3] = map.isBlank(row, column) ? 0 : 255;
    }
  });
  const cells = el("canvas", { width: columns, height: rows });
  cells.getContext("2d")?.putImageData(image, 0, 0);
  const [wide, tall] = [width / columns, height / rows];
  context.imageSmoothingEnabled = Math.min(wide, tall) < 1;
  context.fillStyle = colour("grid");
  context.fillRect(x, y, width, height);
  context.drawImage(cells, x, y, width, height);
  const card = colour("card");
  const separate = (
    /** @type {number} */ cell,
    /** @type {number} */ count,
    /** @type {number} */ group,
    /** @type {boolean} */ isDown,
  ) => {
    for (let i = 1; i < count; i++) {
      const thickness = group > 1 && i % group === 0 && cell * group > 6 ? 2 : cell > 9 ? 1 : 0;
      if (!thickness) continue;
      if (isDown) line(context, x, y + i * cell, x + width, y + i * cell, card, thickness);
      else line(context, x + i * cell, y, x + i * cell, y + height, card, thickness);
    }
  };
  separate(wide, columns, map.across, false);
  separate(tall, rows, map.down, true);
}

/** Traffic is skewed: colours go by the square root, so that small values differ. @param {number} largest */
function rootShare(largest) {
  return (/** @type {number} */ value) => Math.sqrt(value / (largest || 1));
}

/**
 * A heat map with labels, and with the sums of rows and columns at its edges.
 * @param {MatrixView} view
 * @param {number[][]} values
 * @param {number} largest @param {number} largestSum
 * @param {string} name
 */
function trafficMap(view, values, largest, largestSum, name) {
  const count = values.length;
  const isRanks = view.cell === "rank";
  const unit = isRanks ? view.ranks_per_node : 1;
  const map = {
    values,
    share: rootShare(largest),
    across: unit,
    down: unit,
    isBlank: (/** @type {number} */ row, /** @type {number} */ column) =>
      Math.floor(row / unit) === Math.floor(column / unit) && view.nodes_per_cell === 1,
  };
  const sent = values.map(sum);
  const received = range(count).map((column) => values.reduce((total, row) => total + row[column], 0));
  const side = (/** @type {number} */ width) => width - EDGE.left - EDGE.gap - EDGE.bars;
  const made = picture(
    name,
    (width) => EDGE.top + side(width) + EDGE.gap + EDGE.bars,
    (context, width) => {
      const square = side(width);
      const cell = square / count;
      drawHeatMap(context, map, EDGE.left, EDGE.top, square, square);
      write(context, `receiving ${cellName(view, 0).split(" ")[0]}`, EDGE.left, 8);
      const step = labelStep(cell, unit, 30);
      for (let i = 0; i < count; i += step) {
        const middle = step === 1 || !isRanks ? (i + 0.5) * cell : i * cell + 4;
        write(context, String(i * view.nodes_per_cell), EDGE.left + middle, EDGE.top - 10, "center");
        write(
          context,
          String(i * view.nodes_per_cell),
          EDGE.left - 7,
          EDGE.top + (step === 1 || !isRanks ? middle : middle + 3),
          "right",
        );
      }
      const bar = Math.max(1, cell - (cell > 4 ? 1 : 0));
      context.fillStyle = colour("accent");
      for (let i = 0; i < count; i++) {
        const [right, down] = [sent[i], received[i]].map((value) => (EDGE.bars * value) / (largestSum || 1));
        context.fillRect(EDGE.left + square + EDGE.gap, EDGE.top + i * cell, right, bar);
        context.fillRect(EDGE.left + i * cell, EDGE.top + square + EDGE.gap, bar, down);
      }
    },
  );
  const at = (/** @type {number} */ x, /** @type {number} */ y) => {
    const cell = side(made.box.clientWidth) / count;
    return [Math.floor((y - EDGE.top) / cell), Math.floor((x - EDGE.left) / cell)];
  };
  explain(made.canvas, (x, y) => {
    const [row, column] = at(x, y);
    const bytes = (/** @type {number} */ rows) => `${digits(rows)} rows, ${size(rows * view.bytes_per_row)}`;
    if (row >= 0 && row < count && column >= count) return `${cellName(view, row)} sends\n${bytes(sent[row])}`;
    if (column >= 0 && column < count && row >= count)
      return `${cellName(view, column)} receives\n${bytes(received[column])}`;
    if (!values[row] || !(column >= 0 && column < count)) return "";
    const both = `${cellName(view, row)} to ${cellName(view, column)}`;
    return map.isBlank(row, column) ? `${both}\nwithin a node` : `${both}\n${bytes(values[row][column])}`;
  });
  return { ...made, at, sent, received };
}

/** @param {MatrixView} view @param {number} i */
function cellName(view, i) {
  if (view.nodes_per_cell === 1) return `${view.cell} ${i}`;
  return `nodes ${i * view.nodes_per_cell} to ${(i + 1) * view.nodes_per_cell - 1}`;
}

/** @param {MatrixView} view @param {number[][]} values @param {string} what */
function describeMap(view, values, what) {
  const sent = values.map(sum);
  const busiest = sent.indexOf(most(sent));
  return (
    `${what}: ${digits(sum(sent))} rows between ${digits(values.length)} ${view.cell}s; ` +
    `${cellName(view, busiest)} sends most, ${digits(sent[busiest] ?? 0)} rows`
  );
}

/** @param {MatrixView} view */
function drawMatrix(view) {
  const largest = most([...view.before, ...view.after].map(most));
  const sums = (/** @type {number[][]} */ values) => [
    ...values.map(sum),
    ...range(values.length).map((i) => values.reduce((all, row) => all + row[i], 0)),
  ];
  const largestSum = most([...sums(view.before), ...sums(view.after)]);
  const maps = [
    { what: "A copy for each expert", values: view.before },
    { what: "Sent: a copy for each node", values: view.after },
  ].map(({ what, values }) => ({
    what,
    values,
    ...trafficMap(view, values, largest, largestSum, describeMap(view, values, what)),
  }));
  const shown = maps.map(({ what, values, box }) =>
    el("div", {}, el("h3", {}, what, el("small", {}, `${digits(sum(values.map(sum)))} rows`)), box),
  );
  const legend = el("p", { class: "legend" }, ramp("0", digits(Math.round(largest / 4)), `${digits(largest)} rows`));
  if (view.nodes_per_cell === 1)
    legend.append(swatch("within a node: not on the network", `background: ${"var(--grid)"}`));
  legend.append(swatch("totals sent and received", "background: var(--accent)"));
  /** @type {HTMLElement[]} */
  const parts = [el("div", { class: "pair" }, ...shown), legend];
  if (view.cell === "node" && view.nodes_per_cell === 1 && view.ranks_before.length)
    parts.push(ranksOfNode(view, maps));
  parts.push(numbers(view, "Rows that each one sends and receives", () => matrixTable(view, maps)));
  return parts;
}

/**
 * @param {MatrixView} view
 * @param {{sent: number[], received: number[], values: number[][]}[]} maps
 */
function matrixTable(view, [before, after]) {
  const isSmall = view.before.length <= 16;
  const head = [view.cell, "sends before", "after", "receives before", "after"];
  const names = range(view.before.length).map((i) => cellName(view, i));
  return {
    head: isSmall ? [...head, ...names.map((name) => `to ${name}, after`)] : head,
    rows: names.map((name, i) => [
      name,
      ...[before.sent[i], after.sent[i], before.received[i], after.received[i]].map((value) => figure(value)),
      ...(isSmall ? after.values[i].map((value) => figure(value)) : []),
    ]),
  };
}

/**
 * The ranks of a node, chosen by number or by a click: what each sends to every node.
 * @param {MatrixView} view
 * @param {{box: HTMLElement, canvas: HTMLCanvasElement, at: (x: number, y: number) => number[]}[]} maps
 */
function ranksOfNode(view, maps) {
  const { field, input, choose } = nodeField(view.before.length, "Ranks of node");
  const place = el("div", { "aria-live": "polite" });
  const show = () => {
    const node = choose();
    place.replaceChildren();
    if (node < 0) return;
    const first = node * view.ranks_per_node;
    const both = [view.ranks_before, view.ranks_after].map((all) => all.slice(first, first + view.ranks_per_node));
    const largest = most(both.flat().map(Number));
    const titles = ["A copy for each expert", "Sent: a copy for each node"];
    const shown = both.map((values, i) => rankMap(view, node, values, largest, titles[i]));
    place.append(el("div", { class: "pair", style: "margin-top: 18px" }, ...shown));
  };
  input.addEventListener("input", show);
  for (const { box, canvas, at } of maps) {
    box.classList.add("picks");
    canvas.addEventListener("click", (event) => {
      const where = canvas.getBoundingClientRect();
      const [row, column] = at(event.clientX - where.left, event.clientY - where.top);
      const node = column < 0 || row >= view.before.length ? column : row;
      if (node < 0 || node >= view.before.length) return;
      input.value = String(node);
      show();
    });
  }
  return el("div", {}, field, place);
}

/**
 * What each rank of a node sends to every node.
 * @param {MatrixView} view @param {number} node
 * @param {number[][]} values @param {number} largest @param {string} title
 */
function rankMap(view, node, values, largest, title) {
  const first = node * view.ranks_per_node;
  const [sent, columns] = [values.map(sum), values[0].length];
  const ranks = `ranks ${first} to ${first + values.length - 1} of node ${node}`;
  const name = `${title}: ${ranks} send ${digits(sum(sent))} rows, the busiest ${digits(most(sent))}`;
  const isBlank = (/** @type {number} */ _, /** @type {number} */ column) => column === node;
  const map = { values, share: rootShare(largest), across: 1, down: 1, isBlank };
  const tall = Math.max(6, Math.min(18, 300 / values.length));
  const bottom = tall * values.length;
  /** @type {Draw} */
  const drawMap = (context, width) => {
    drawHeatMap(context, map, EDGE.left, 0, width - EDGE.left, bottom);
    const cell = (width - EDGE.left) / columns;
    const [down, across] = [labelStep(tall, 1, 14), labelStep(cell, 1, 30)];
    for (let row = 0; row < values.length; row += down)
      write(context, String(first + row), EDGE.left - 7, (row + 0.5) * tall, "right");
    for (let column = 0; column < columns; column += across)
      write(context, String(column), EDGE.left + (column + 0.5) * cell, bottom + 12, "center");
  };
  const made = picture(name, () => bottom + 24, drawMap);
  explain(made.canvas, (x, y) => {
    const row = Math.floor(y / tall);
    const column = Math.floor(((x - EDGE.left) * columns) / (made.box.clientWidth - EDGE.left));
    const rows = values[row]?.[column];
    return rows === undefined ? "" : `rank ${first + row} to node ${column}\n${digits(rows)} rows`;
  });
  const axes = el("small", {}, "its ranks down, receiving nodes across");
  return el("div", {}, el("h3", {}, `${title}, node ${node}`, axes), made.box);
}

/**
 * A field for the number of a node.
 * @param {number} count @param {string} label
 */
function nodeField(count, label) {
  const id = `node-${document.querySelectorAll("input").length}-${nodeField.made++}`;
  const input = el("input", { type: "number", id, min: 0, max: count - 1, placeholder: "none" });
  const hint = el("span", {}, `0 to ${count - 1}, or choose one in the picture`);
  const field = el("div", { class: "controls" }, el("label", { for: id }, label), input, hint);
  const choose = () =>
    input.value !== "" && Number(input.value) >= 0 && Number(input.value) < count
      ? Math.floor(Number(input.value))
      : -1;
  return { field, input, choose };
}
nodeField.made = 0;
