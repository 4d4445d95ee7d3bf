// The page: it reads every second what the node says, and shows it. Text from the network only ever becomes text nodes.
import { LineChart, drawMeetings } from "./charts.js";
import { qrcode } from "./vendor/qrcode.js";

// A page of the table: whatever the run's size, so much is drawn of it and no more.
const ROWS = 100;
const byId = (id) => document.getElementById(id);
// The page is also a file of a run's public page: then it shows a file with the run, and nothing of one node.
const isPublic = document.body.classList.contains("public");
const PUBLIC_SECONDS = 30, OWN_SECONDS = 1, MEMBERS_SECONDS = 5, SMALL_RUN = 64;
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

// The phases until a node trains, and what a person calls them.
const STEPS = [["starting", "start"], ["joining", "find the run"], ["fetching weights", "fetch weights"], ["preparing", "load the model"]];
const time = { xLabel: clock, isTime: true };
const charts = {
  loss: new LineChart(byId("loss"), byId("loss-at"), { xLabel: (value) => `round ${Math.round(value)}`, yLabel: loss }),
  throughput: new LineChart(byId("throughput"), byId("throughput-at"), { ...time, yLabel: (value) => figure(value), fromZero: true }),
  mean: new LineChart(byId("mean"), byId("mean-at"), { ...time, yLabel: loss }),
};
const view = () => ({ range: Number(byId("range").value), smooth: Number(byId("smooth").value), isLog: byId("log").checked });

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A name stands apart, whichever way it is written, and never without the id: anyone may take any name.
function peerCell({ peer_id: peer, name }) {
  const cell = element("td", name ? `${brief(peer)} ` : brief(peer));
  if (name) cell.append(element("bdi", `"${name}"`));
  return cell;
}

function row(values, className) {
  const made = document.createElement("tr");
  made.append(...values.map((value) => (value instanceof Node ? value : element("td", value))));
  if (className) made.className = className;
  return made;
}

function showOverview() {
  const { run, headline, summary, now } = overview;
  byId("headline").textContent = headline.text;
  byId("headline").className = headline.level;
  byId("remedy").textContent = headline.remedy;
  byId("remedy").hidden = !headline.remedy;
  byId("run").textContent = `${run.name}${run.run_id ? ` (run ${run.run_id.slice(0, 16)})` : ""}`;
  byId("summary").textContent = isPublic ? `${summary}; written ${new Date(now * 1000).toLocaleString()}` : summary;
  document.title = `${headline.level === "trouble" ? "! " : ""}${run.name || "farandole"} ${loss(isPublic ? run.loss_mean : overview.status.loss)}`;
  byId("throughput-now").textContent = `${figure(run.tokens_per_second)} tokens/s`;
  byId("mean-now").textContent = loss(run.loss_mean);
  const shown = { ...view(), isLog: false };
  charts.throughput.draw([{ points: overview.throughput, colour: "own", width: 1.5, name: "tokens/s" }], shown);
  charts.mean.draw([{ points: overview.mean_loss, colour: "own", width: 1.5, name: "mean loss" }], view());
  if (!isPublic) showOwn(overview);
}

function showOwn({ status, run, rows, warnings, validation, now }) {
  showLimits(status);
  showSteps(status);
  byId("loss-now").textContent = status.loss === null ? "" : `${loss(status.loss)} here, ${loss(run.loss_mean)} on average`;
  const heldOut = validation.at(-1)?.[1];
  const bits = status.bits_per_byte === null ? "" : ` (${loss(status.bits_per_byte)} bits per byte)`;
  byId("held-now").textContent = heldOut === undefined ? "" : `, ${loss(heldOut)}${bits}`;
  showNode(status, rows);
  showStages(run, status.stage);
  byId("exchanges").replaceChildren(...[...status.recent_exchanges].reverse().map((exchange) => row([
    String(exchange.round),
    exchange.partner ? peerCell({ peer_id: exchange.partner, name: status.names[exchange.partner] }) : "-",
    element("td", exchange.verdict, exchange.verdict.startsWith("alone") ? "" : exchange.verdict === "committed" ? "committed" : "failed"),
    size(exchange.bytes_sent), duration(exchange.seconds), exchange.path || "-", duration(now - exchange.ended_at),
  ])));
  byId("warnings").replaceChildren(...(warnings.length ? [...warnings].reverse() : ["none"]).map((text) => element("li", text)));
}

function showLimits({ upload_mbit: up, download_mbit: down, quiet_hours: hours }) {
  const cap = (value) => (value ? `${figure(value)} Mbit/s` : "no cap");
  const texts = [`upload: ${cap(up)}`, `download: ${cap(down)}`, ...(hours.length ? [`quiet hours: ${hours.join(", ")}`] : [])];
  byId("limits").replaceChildren(...texts.map((text) => element("li", text)));
}

function showSteps({ phase }) {
  const now = STEPS.findIndex(([name]) => name === phase);
  byId("steps").hidden = now < 0;
  byId("steps").replaceChildren(...STEPS.map(([, words], index) => {
    const step = element("li", words, index < now ? "done" : index === now ? "now" : "");
    if (index === now) step.setAttribute("aria-current", "step");
    return step;
  }));
}

function showNode(status, rows) {
  byId("node").replaceChildren(...rows.map(({ label, value, emphasis }) => {
    const pair = document.createElement("div");
    pair.append(element("dt", label), element("dd", value, emphasis));
    return pair;
  }));
  const isPaused = status.phase === "paused";
  byId("pause").hidden = isPaused || status.phase === "relaying"; // it does not train
  byId("resume").hidden = !isPaused;
  byId("invite").hidden = status.phase === "relaying"; // it is in no run
}

function showStages({ providers }, own) {
  byId("stages-section").hidden = providers.length < 2;
  byId("stages").replaceChildren(...providers.map((number, stage) =>
    element("li", `${number} live${stage === own ? ", this node among them" : ""}${number ? "" : ": nobody holds it"}`)));
}

function showMembers() {
  const { members, curves, meetings } = membersView;
  const own = members.find((member) => member.state === "this node");
  const lines = Object.entries(curves)
    .map(([peer, points]) => (own && peer === own.peer_id ? { points, colour: "own", width: 2, name: "this node" } : { points, colour: "many", width: 1 }))
    .sort((one, other) => one.width - other.width);
  if (overview?.validation?.length > 1) lines.push({ points: overview.validation, colour: "held", width: 2, name: "held-out" });
  charts.loss.draw(lines, view());
  const live = members.filter((member) => member.state === "live" || member.state === "this node");
  const fade = Math.max(30, 2 * roundSeconds(meetings));
  drawMeetings(byId("meetings"), live.map((member) => member.peer_id).sort(), own?.peer_id, meetings, overview?.now ?? 0, fade, brief);
  const wanted = byId("filter").value.trim().toLowerCase();
  const found = members.filter((member) => !wanted ||
    [member.peer_id, member.name, member.state, member.device, member.path, member.reach].some((text) => text.toLowerCase().includes(wanted)));
  if (firstRow >= found.length) firstRow = 0;
  const shown = found.slice(firstRow, firstRow + ROWS);
  byId("members-count").textContent = found.length === members.length ? `${members.length}` : `${found.length} of ${members.length}`;
  byId("pages").hidden = found.length <= ROWS;
  byId("rows").textContent = `${firstRow + 1} to ${firstRow + shown.length}`;
  byId("before").disabled = firstRow === 0;
  byId("after").disabled = firstRow + ROWS >= found.length;
  byId("members").replaceChildren(...shown.map((member) => row([
    peerCell(member), member.remark ? `${member.state}: ${member.remark}` : member.state, String(member.stage), String(member.round), figure(member.tokens),
    figure(member.tokens_per_second), loss(member.loss), member.path || "-", member.reach || "-", member.device,
    member.last_seen_seconds === null ? "-" : `${duration(member.last_seen_seconds)} ago`,
  ], member.state === "gone" || member.state === "left" ? "gone" : "")));
}

// How long a round takes, from when meetings of different rounds were seen.
function roundSeconds(meetings) {
  if (meetings.length < 2) return 30;
  const first = meetings[0], last = meetings[meetings.length - 1];
  return last[1] > first[1] ? (last[0] - first[0]) / (last[1] - first[1]) : 30;
}

// What the node answers to an action, or null: then the element `problem` says why not.
async function ask(action, params = {}, problem = byId("answer")) {
  try {
    const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
    const response = await fetch(`api/${action}`, { method: "POST", headers, body: JSON.stringify(params) });
    const said = await response.json();
    if (response.ok) return String(said.ok);
    problem.textContent = said.error;
  } catch {
    problem.textContent = "the node does not answer";
  }
  return null;
}

async function act(action) {
  const said = await ask(action);
  if (said !== null) byId("answer").textContent = said;
}

async function invite() {
  const said = await ask("invitation");
  if (said === null) return;
  const [text, ...warnings] = said.split("\n");
  byId("answer").textContent = "";
  byId("invitation-text").value = `farandole join ${text}`;
  byId("invitation-note").textContent =
    ["Whoever has it can join the run: send it to people whom you want there.", ...warnings].join(" Warning: ");
  drawCode(byId("invitation-code"), text);
  byId("invitation").showModal();
}

function limit() {
  if (!overview) return;
  byId("caps-up").value = overview.status.upload_mbit;
  byId("caps-down").value = overview.status.download_mbit;
  byId("caps-quiet").value = overview.status.quiet_hours.join(", ");
  byId("caps-problem").textContent = "";
  byId("caps").showModal();
}

async function setCaps(event) {
  event.preventDefault();
  const caps = { upload_mbit: Number(byId("caps-up").value), download_mbit: Number(byId("caps-down").value) };
  const hours = byId("caps-quiet").value.trim(), said = [await ask("limit", caps, byId("caps-problem"))];
  if (said[0] !== null && hours !== overview.status.quiet_hours.join(", ")) {
    said.push(await ask("quiet", { hours }, byId("caps-problem")));
  }
  if (said.includes(null)) return;
  byId("caps").close();
  byId("answer").textContent = said.join("; ");
}

function drawCode(canvas, text) {
  const code = qrcode(0, "L"), margin = 4;
  code.addData(text);
  code.make();
  const size = code.getModuleCount();
  canvas.width = canvas.height = size + 2 * margin;
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#000";
  for (let row = 0; row < size; row += 1) {
    for (let column = 0; column < size; column += 1) if (code.isDark(row, column)) context.fillRect(column + margin, row + margin, 1, 1);
  }
}

for (const action of ["pause", "resume"]) byId(action).addEventListener("click", () => act(action));
byId("invite").addEventListener("click", invite);
byId("limit").addEventListener("click", limit);
byId("caps-form").addEventListener("submit", setCaps);
byId("caps-close").addEventListener("click", () => byId("caps").close());
byId("close").addEventListener("click", () => byId("invitation").close());
byId("copy").addEventListener("click", async () => {
  byId("invitation-text").select();
  try {
    await navigator.clipboard.writeText(byId("invitation-text").value);
    byId("invitation-note").textContent = "copied";
  } catch {
    byId("invitation-note").textContent = "the text is selected: copy it with the keyboard";
  }
});
for (const id of ["range", "smooth", "log"]) byId(id).addEventListener("change", () => redraw());
byId("leave").addEventListener("click", () => {
  if (confirm("Leave the run? This ends the node on this machine.")) act("leave");
});
function turnTo(row) {
  firstRow = row;
  showMembers();
}

byId("filter").addEventListener("input", () => turnTo(0));
byId("before").addEventListener("click", () => turnTo(firstRow - ROWS));
byId("after").addEventListener("click", () => turnTo(firstRow + ROWS));
window.addEventListener("resize", () => redraw());

function redraw() {
  if (!overview) return;
  showOverview();
  showMembers();
}


async function read(path) {
  const response = await fetch(path, { cache: "no-cache", headers: token ? { Authorization: `Bearer ${token}` } : {} });
  const said = await response.json();
  if (!response.ok) throw new Error(said.error);
  return said;
}

// How others reach a member, as it announces; a public page has no addresses.
const reach = ({ addresses }) => (addresses.some((address) => address.includes("/p2p-circuit")) ? "relay" : addresses.length ? "public" : "");
const whole = ({ member, ...shown }) => ({ ...member, ...shown, reach: reach(member) });

let membersAt = 0;
async function reload() {
  if (isPublic) {
    ({ overview, members: membersView } = await read("run.json"));
    membersView.members = membersView.members.map(whole);
    return;
  }
  overview = await read("api/overview");
  // The members of a large run are a hundred times as much data as the rest.
  if (membersView.members.length <= SMALL_RUN || Date.now() >= membersAt) {
    membersView = await read("api/members");
    membersView.members = membersView.members.map(whole);
    membersAt = Date.now() + 1000 * MEMBERS_SECONDS;
  }
}

for (;;) {
  try {
    await reload();
    redraw();
  } catch (error) {
    if (!isPublic) { // what a public page shows says when it was written
      byId("headline").textContent = error instanceof TypeError ? "the node does not answer: it has left, or was stopped" : error.message;
      byId("headline").className = "trouble";
    }
  }
  await new Promise((go) => { setTimeout(go, 1000 * (isPublic ? PUBLIC_SECONDS : OWN_SECONDS)); });
}
