// The page: events of the node come in, and what they say is shown. Text from the network only ever becomes text nodes.
import { drawLines, drawMeetings } from "./charts.js";

// A page of the table: whatever the run's size, so much is drawn of it and no more.
const ROWS = 100;
const byId = (id) => document.getElementById(id);
let overview = null;
let membersView = { members: [], curves: {}, meetings: [] };
let firstRow = 0;

// The token came in the address, and goes from there: it shall not be copied with the address.
if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}

const token = sessionStorage.getItem("token") ?? "";

const figure = (value, digits = 3) => {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= unit) return `${(value / unit).toPrecision(digits)} ${letter}`;
  }
  return String(Math.round(value * 100) / 100);
};
const size = (value) => (value >= 1000 ? `${figure(value)}B` : `${Math.round(value)} B`);
const loss = (value) => (value === null || value === undefined ? "-" : value.toFixed(3));
const brief = (peer) => peer.slice(-8);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const duration = (seconds) => {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
};

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(values, className) {
  const made = document.createElement("tr");
  made.append(...values.map((value) => (value instanceof Node ? value : element("td", value))));
  if (className) made.className = className;
  return made;
}

function showOverview() {
  const { status, now, headline, rows } = overview;
  byId("headline").textContent = headline.text;
  byId("headline").className = headline.level;
  byId("remedy").textContent = headline.remedy;
  byId("remedy").hidden = !headline.remedy;
  const run = `${status.run.name || "farandole"}${status.run.run_id ? `, run ${status.run.run_id.slice(0, 16)}` : ""}`;
  byId("run").textContent = `${run}; ${rows.find(({ label }) => label === "the run").value}`;
  document.title = `${headline.level === "trouble" ? "! " : ""}${status.run.name || "farandole"} ${loss(status.loss)}`;
  byId("loss-now").textContent = status.loss === null ? "" : `${loss(status.loss)} here, ${loss(status.run.loss_mean)} on average`;
  const heldOut = overview.validation.at(-1)?.[1];
  const bits = status.bits_per_byte === null ? "" : ` (${loss(status.bits_per_byte)} bits per byte)`;
  byId("held-now").textContent = heldOut === undefined ? "" : `, ${loss(heldOut)}${bits}`;
  byId("throughput-now").textContent = `${figure(status.run.tokens_per_second)} tokens/s`;
  byId("mean-now").textContent = loss(status.run.loss_mean);
  drawLines(byId("throughput"), [{ points: overview.throughput, colour: "own", width: 1.5 }],
    { xLabel: clock, yLabel: (value) => figure(value), fromZero: true });
  drawLines(byId("mean"), [{ points: overview.mean_loss, colour: "own", width: 1.5 }], { xLabel: clock, yLabel: loss });
  showNode(status, rows);
  showStages(status);
  byId("exchanges").replaceChildren(...[...status.recent_exchanges].reverse().map((exchange) => row([
    String(exchange.round), exchange.partner ? brief(exchange.partner) : "-",
    element("td", exchange.verdict, exchange.verdict === "committed" ? "committed" : "failed"),
    size(exchange.bytes_sent), duration(exchange.seconds), exchange.path || "-", duration(now - exchange.ended_at),
  ])));
  byId("warnings").replaceChildren(...(status.warnings.length ? [...status.warnings].reverse() : ["none"]).map((text) => element("li", text)));
}

function showNode(status, rows) {
  byId("node").replaceChildren(...rows.filter(({ label }) => label !== "the run").flatMap(
    ({ label, value, emphasis }) => [element("dt", label), element("dd", value, emphasis)]));
  const isPaused = status.phase === "paused";
  byId("pause").hidden = isPaused || status.phase === "relaying"; // it does not train
  byId("resume").hidden = !isPaused;
}

function showStages(status) {
  const providers = status.run.providers;
  byId("stages-section").hidden = providers.length < 2;
  byId("stages").replaceChildren(...providers.map((number, stage) =>
    element("li", `${number} live${stage === status.stage ? ", this node among them" : ""}${number ? "" : ": nobody holds it"}`)));
}

function showMembers() {
  const { members, curves, meetings } = membersView;
  const own = members.find((member) => member.state === "this node");
  const lines = Object.entries(curves)
    .map(([peer, points]) => (own && peer === own.peer_id ? { points, colour: "own", width: 2 } : { points, colour: "many", width: 1 }))
    .sort((one, other) => one.width - other.width);
  if (overview?.validation.length > 1) lines.push({ points: overview.validation, colour: "held", width: 2 });
  drawLines(byId("loss"), lines, { xLabel: (value) => `round ${Math.round(value)}`, yLabel: loss });
  const live = members.filter((member) => member.state === "live" || member.state === "this node");
  const fade = Math.max(30, 2 * roundSeconds(meetings));
  drawMeetings(byId("meetings"), live.map((member) => member.peer_id).sort(), own?.peer_id, meetings, overview?.now ?? 0, fade);
  const wanted = byId("filter").value.trim().toLowerCase();
  const found = members.filter((member) => !wanted ||
    [member.peer_id, member.state, member.device, member.link, member.reach].some((text) => text.toLowerCase().includes(wanted)));
  if (firstRow >= found.length) firstRow = 0;
  const shown = found.slice(firstRow, firstRow + ROWS);
  byId("members-count").textContent = found.length === members.length ? `${members.length}` : `${found.length} of ${members.length}`;
  byId("pages").hidden = found.length <= ROWS;
  byId("rows").textContent = `${firstRow + 1} to ${firstRow + shown.length}`;
  byId("before").disabled = firstRow === 0;
  byId("after").disabled = firstRow + ROWS >= found.length;
  byId("members").replaceChildren(...shown.map((member) => row([
    brief(member.peer_id), member.state, String(member.stage), String(member.round), figure(member.tokens),
    figure(member.tokens_per_second), loss(member.loss), member.link || "-", member.reach || "-", member.device,
    member.seen === null ? "-" : `${duration(member.seen)} ago`,
  ], member.state === "gone" || member.state === "left" ? "gone" : "")));
}

// How long a round takes, from when meetings of different rounds were seen.
function roundSeconds(meetings) {
  if (meetings.length < 2) return 30;
  const first = meetings[0], last = meetings[meetings.length - 1];
  return last[1] > first[1] ? (last[0] - first[0]) / (last[1] - first[1]) : 30;
}

async function ask(deed) {
  const answer = byId("answer");
  try {
    const response = await fetch(`api/${deed}`, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
    const said = await response.json();
    answer.textContent = response.ok ? String(said.ok) : said.error;
  } catch {
    answer.textContent = "the node does not answer";
  }
}

for (const deed of ["pause", "resume"]) byId(deed).addEventListener("click", () => ask(deed));
byId("leave").addEventListener("click", () => {
  if (confirm("Leave the run? This ends the node on this machine.")) ask("leave");
});
function turnTo(row) {
  firstRow = row;
  showMembers();
}

byId("filter").addEventListener("input", () => turnTo(0));
byId("before").addEventListener("click", () => turnTo(firstRow - ROWS));
byId("after").addEventListener("click", () => turnTo(firstRow + ROWS));
window.addEventListener("resize", () => { if (overview) { showOverview(); showMembers(); } });

const events = new EventSource(`events?token=${encodeURIComponent(token)}`);
events.addEventListener("overview", (event) => { overview = JSON.parse(event.data); showOverview(); });
events.addEventListener("members", (event) => { membersView = JSON.parse(event.data); showMembers(); });
events.addEventListener("error", async () => {
  let trouble = "the node does not answer: it has left, or was stopped";
  try {
    const response = await fetch("api/overview", { headers: { Authorization: `Bearer ${token}` } });
    if (!response.ok) trouble = (await response.json()).error;
  } catch { /* it does not answer */ }
  byId("headline").textContent = trouble;
  byId("headline").className = "trouble";
});
