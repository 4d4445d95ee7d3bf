// Drawing on canvases: lines with their axes, and partners in a circle. No state: what is given is what is drawn.

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

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// lines: [{ points: [[x, y], ...], colour, width }]; label(x), label(y) write the ends of the axes.
export function drawLines(canvas, lines, { xLabel, yLabel, fromZero = false }) {
  const { context, width, height } = prepare(canvas);
  const all = lines.flatMap((line) => line.points);
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colour("faint");
  if (all.length < 2) {
    context.fillText("nothing to draw yet", 8, height / 2);
    return;
  }
  const [left, right] = extent(all.map((point) => point[0]));
  let [low, high] = extent(all.map((point) => point[1]));
  if (fromZero) low = Math.min(low, 0);
  const margin = { left: 52, right: 8, top: 8, bottom: 20 };
  const x = (value) => margin.left + ((value - left) / (right - left || 1)) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - ((value - low) / (high - low || 1)) * (height - margin.top - margin.bottom);
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const value of [low, (low + high) / 2, high]) {
    context.beginPath();
    context.moveTo(margin.left, y(value));
    context.lineTo(width - margin.right, y(value));
    context.stroke();
    context.fillText(yLabel(value), margin.left - 6, y(value) + 4);
  }
  context.textAlign = "left";
  context.fillText(xLabel(left), margin.left, height - 5);
  context.textAlign = "right";
  context.fillText(xLabel(right), width - margin.right, height - 5);
  context.lineJoin = "round";
  for (const line of lines) {
    context.strokeStyle = colour(line.colour);
    context.lineWidth = line.width;
    context.beginPath();
    line.points.forEach(([px, py], index) => (index ? context.lineTo(x(px), y(py)) : context.moveTo(x(px), y(py))));
    context.stroke();
  }
}

// peers: ids in the order of the circle; meetings: [at, round, one, other], the older the fainter.
export function drawMeetings(canvas, peers, own, meetings, now, fadeSeconds) {
  const { context, width, height } = prepare(canvas);
  const radius = Math.min(width, height) / 2 - 14;
  const place = new Map();
  peers.forEach((peer, index) => {
    const angle = (2 * Math.PI * index) / peers.length - Math.PI / 2;
    place.set(peer, [width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle)]);
  });
  context.strokeStyle = colour("own");
  context.lineWidth = 2;
  for (const [at, , one, other] of meetings) {
    const from = place.get(one), to = place.get(other);
    const age = (now - at) / fadeSeconds;
    if (!from || !to || age >= 1) continue;
    context.globalAlpha = 1 - Math.max(0, age);
    context.beginPath();
    context.moveTo(...from);
    context.quadraticCurveTo(width / 2, height / 2, ...to);
    context.stroke();
  }
  context.globalAlpha = 1;
  const dot = peers.length > 100 ? 2 : 6;
  const circle = (x, y, radius) => {
    context.moveTo(x + radius, y);
    context.arc(x, y, radius, 0, 2 * Math.PI);
  };
  context.fillStyle = colour("many");
  context.beginPath();
  for (const [px, py] of place.values()) circle(px, py, dot);
  context.fill();
  if (place.has(own)) {
    context.fillStyle = colour("held");
    context.beginPath();
    circle(...place.get(own), dot + 2);
    context.fill();
  }
}
