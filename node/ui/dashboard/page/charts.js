// Drawing: lines with uPlot, and partners in a circle on a canvas.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const smoothed = (points, keep) => {
  let last = null;
  return points.map(([x, y]) => [x, (last = last === null ? y : keep * last + (1 - keep) * y)]);
};

// Distances of labels: whole rounds; whole minutes, and hours.
const STEPS = {
  rounds: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6],
  time: [60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 7 * 86400, 30 * 86400],
};

// Lines in the element `host`, which they fill. `readout` shows the values under the pointer.
export class LineChart {
  constructor(host, readout, { xLabel, yLabel, fromZero = false, isTime = false }) {
    Object.assign(this, { host, readout, xLabel, yLabel, fromZero, isTime, plot: null, shape: "", lines: [], view: {} });
    new ResizeObserver(() => this.fit()).observe(host);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.shape = ""; this.draw(this.lines, this.view); });
  }

  // lines: [{ points: [[x, y], ...], colour, width, name }], those without a name are not read out;
  // view: { range: share of the newest x, smooth: share of the last value that is kept, isLog }.
  draw(lines, view) {
    this.lines = lines;
    this.view = view;
    const shown = lines.map((line) => ({ ...line, points: smoothed(this.cut(line.points), view.smooth) }));
    const xs = [...new Set(shown.flatMap((line) => line.points.map(([x]) => x)))].sort((one, other) => one - other);
    if (xs.length < 2) {
      this.end();
      this.host.textContent = "nothing to draw yet";
      return;
    }
    const at = new Map(xs.map((x, index) => [x, index]));
    const columns = shown.map((line) => {
      const column = new Array(xs.length).fill(undefined);
      for (const [x, y] of line.points) column[at.get(x)] = y;
      return column;
    });
    const shape = JSON.stringify([view.isLog, shown.map((line) => [line.colour, line.width, line.name])]);
    if (shape !== this.shape) this.begin(shown, view.isLog);
    this.shape = shape;
    this.plot.setData([xs, ...columns]);
  }

  cut(points) {
    const all = this.lines.flatMap((line) => (line.points.length ? [line.points[0][0], line.points.at(-1)[0]] : []));
    const [first, last] = [Math.min(...all), Math.max(...all)];
    return points.filter(([x]) => x >= last - (last - first) * this.view.range);
  }

  begin(lines, isLog) {
    this.end();
    this.host.textContent = "";
    const axis = { stroke: colour("faint"), font: "12px system-ui, sans-serif", grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width: this.host.clientWidth, height: this.host.clientHeight, legend: { show: false },
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: this.isTime }, y: { distr: isLog ? 3 : 1, range: isLog ? undefined : (plot, low, high) => this.bounds(low, high) } },
      axes: [
        { ...axis, size: 28, space: 90, incrs: STEPS[this.isTime ? "time" : "rounds"], values: (plot, values) => values.map((value) => this.tick(value)) },
        { ...axis, size: 60, values: (plot, values) => values.map((value) => (value === null ? "" : this.yLabel(value))) },
      ],
      series: [{}, ...lines.map((line) => ({ stroke: colour(line.colour), width: line.width, spanGaps: true, points: { show: false } }))],
      hooks: { setCursor: [(plot) => this.read(plot, lines)] },
    }, [[]], this.host);
  }

  // What stands below the axis: shorter than what is read out.
  tick(value) {
    return this.isTime ? new Date(value * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }) : this.xLabel(value);
  }

  bounds(low, high) {
    if (low === null) return [0, 1];
    const margin = (high - low || Math.abs(high) || 1) * 0.05;
    return [this.fromZero ? 0 : low - margin, high + margin];
  }

  read(plot, lines) {
    const index = plot.cursor.idx;
    if (index === null || index === undefined) {
      this.readout.textContent = "";
      return;
    }
    const near = (column) => {  // lines have values of their own rounds: the last one before the pointer
      for (let at = index; at >= 0; at -= 1) if (column[at] !== undefined && column[at] !== null) return column[at];
      return null;
    };
    const said = lines.flatMap(({ name }, number) => {
      const value = name ? near(plot.data[number + 1]) : null;
      return value === null ? [] : [`${name} ${this.yLabel(value)}`];
    });
    this.readout.textContent = `${this.xLabel(plot.data[0][index])}: ${said.join(", ")}`;
  }

  fit() {
    if (this.plot) this.plot.setSize({ width: this.host.clientWidth, height: this.host.clientHeight });
  }

  end() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.shape = "";
  }
}

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// More names in one circle overlap.
const MAX_NAMES = 40;

// peers: ids in the order of the circle; meetings: [at, round, one, other], the older the fainter; brief(id): its name.
export function drawMeetings(canvas, peers, own, meetings, now, fadeSeconds, brief) {
  const { context, width, height } = prepare(canvas);
  const hasNames = peers.length <= MAX_NAMES;
  const radius = Math.max(20, Math.min(width / 2 - (hasNames ? 80 : 14), height / 2 - (hasNames ? 24 : 14)));
  const place = new Map();
  peers.forEach((peer, index) => {
    const angle = (2 * Math.PI * index) / peers.length - Math.PI / 2;
    place.set(peer, [width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle), angle]);
  });
  context.strokeStyle = colour("own");
  context.lineWidth = 2;
  for (const [at, , one, other] of meetings) {
    const from = place.get(one), to = place.get(other);
    const age = (now - at) / fadeSeconds;
    if (!from || !to || age >= 1) continue;
    context.globalAlpha = 1 - Math.max(0, age);
    context.beginPath();
    context.moveTo(from[0], from[1]);
    context.quadraticCurveTo(width / 2, height / 2, to[0], to[1]);
    context.stroke();
  }
  context.globalAlpha = 1;
  const dot = peers.length > 100 ? 2 : 6;
  const circle = (x, y, size) => {
    context.moveTo(x + size, y);
    context.arc(x, y, size, 0, 2 * Math.PI);
  };
  context.fillStyle = colour("many");
  context.beginPath();
  for (const [x, y] of place.values()) circle(x, y, dot);
  context.fill();
  if (place.has(own)) {
    context.fillStyle = colour("held");
    context.beginPath();
    circle(place.get(own)[0], place.get(own)[1], dot + 2);
    context.fill();
  }
  if (!hasNames) return;
  context.fillStyle = colour("faint");
  context.font = "12px system-ui, sans-serif";
  for (const [peer, [x, y, angle]] of place) {
    const across = Math.cos(angle), down = Math.sin(angle);
    context.textAlign = Math.abs(across) < 0.2 ? "center" : across > 0 ? "left" : "right";
    context.fillText(peer === own ? "this node" : brief(peer), x + across * 14, y + down * 14 + 4);
  }
}
