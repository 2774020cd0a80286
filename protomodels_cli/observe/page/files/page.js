"use strict";
// The page listens to /events: first everything, then what has changed, once a second. It asks for nothing else but
// /owner.json, which is empty for everybody but the owner. Text from the run is only ever set as text.

const SILENT_MS = 4000, AGAIN_MS = 3000, MOST_EVENTS = 120;
const $ = (id) => document.getElementById(id);
const curves = { loss: new Map(), held_out: new Map(), tokens_per_s: new Map() };
const counts = { loss: new Map(), held_out: new Map(), tokens_per_s: new Map() };  // values that a point is the mean of
const lossChart = new Chart($("loss"), "Loss over steps",
  [{ name: "loss", css: "loss", data: curves.loss, counts: counts.loss }, { name: "held-out", css: "held", data: curves.held_out, counts: counts.held_out, of: "evaluation" }], (v, axis) => v.toFixed(axis ? 1 : 4));
const speedChart = new Chart($("speed"), "Throughput over steps",
  [{ name: "tokens a second", css: "speed", data: curves.tokens_per_s, counts: counts.tokens_per_s }], (v) => scaled(v), true);
let state = null, heard = performance.now(), source = null, newest = 0, other = null;

// Numbers as people write them

function figures(x) {
  if (!isFinite(x) || x === 0) return String(x);
  const text = Math.abs(x) >= 100 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(3)).toString();
  return text;
}
function scaled(n) {
  for (const [prefix, scale] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (Math.abs(n) >= scale) return figures(n / scale) + prefix;
  return figures(n);
}
function size(n) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= scale) return `${figures(n / scale)} ${unit}`;
  return `${figures(Math.round(n))} B`;
}
function duration(s) {
  if (s < 0.9995) return s <= 0 ? "0 s" : `${figures(s * 1000)} ms`;
  if (s < 59.5) return `${figures(s)} s`;
  const m = Math.round(s / 60);
  if (s < 600) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
  if (m < 60) return `${m} min`;
  if (m < 48 * 60) return `${Math.floor(m / 60)} h ${String(m % 60).padStart(2, "0")} min`;
  const h = Math.round(s / 3600);
  return `${Math.floor(h / 24)} d ${String(h % 24).padStart(2, "0")} h`;
}
const words = (name) => name.replaceAll("_", " ");
const plural = (n, one) => `${n.toLocaleString("en")} ${one}${n === 1 ? "" : "s"}`;

function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

// What is shown

function show() {
  const s = state;
  document.body.dataset.phase = s.phase;
  document.title = `${s.step}/${s.steps} · ${s.name}`;
  $("name").textContent = s.name;
  $("phase").textContent = s.ended === "stopped" ? "stopped" : words(s.phase);
  $("phase").className = `pill ${{ done: "good", running: "", paused: "bad" }[s.ended === "stopped" ? "paused" : s.phase] ?? "warn"}`;
  $("step").textContent = `step ${s.step.toLocaleString("en")}`;
  const percent = s.steps ? (100 * s.step) / s.steps : 0;
  $("of").textContent = `of ${s.steps.toLocaleString("en")} (${percent.toFixed(1)} %)`;
  const left = s.phase === "running" && s.eta_s !== undefined ? `about ${duration(s.eta_s)} left` : "";
  const toGo = s.tokens_total > s.tokens ? `${scaled(s.tokens_total - s.tokens)} tokens to go` : "";
  $("eta").textContent = [s.running_s ? `${duration(s.running_s)} since the start` : "", left, toGo].filter(Boolean).join(" · ");
  $("bar").setAttribute("aria-valuenow", percent.toFixed(0));
  $("bar").firstElementChild.style.width = `${percent}%`;
  tiles(s);
  stages(s);
  snapshots(s);
  work(s);
  sample(s);
  $("foot").replaceChildren(
    make("span", { title: "each set of peers that hold the stages, linked to each other, is a generation" }, `generation ${s.generation}`), " · ",
    make("span", { title: "each chain of decisions is a lineage: going back to a snapshot begins another" }, `lineage ${s.lineage}`),
    `${s.checkpoint ? ` · started from ${s.checkpoint}` : ""} · coordinator up ${duration(s.uptime_s)} · `,
    make("a", { href: "state.json" }, "state.json"), " · ", make("a", { href: "metrics" }, "metrics"));
  banner();
}

function tiles(s) {
  const tile = (what, value, more, title) =>
    make("div", { class: "tile", title: title || "" }, make("p", { class: "what" }, what), make("p", { class: "value" }, value), make("p", { class: "more" }, more || "\u00a0"));
  const crash = s.crash_redo_s === undefined ? null : s.crash_redo_s + (s.crash_restore_s || 0);
  const redo = plural(s.step - s.snapshot_step, "step");
  const restore = s.crash_restore_s === undefined ? "fetching a part and building" : `${duration(s.crash_restore_s)} to fetch and build`;
  $("tiles").replaceChildren(
    tile("Loss", s.loss === undefined ? "–" : Number(s.loss).toFixed(4), "of the last step", "cross-entropy in nats a token, of the last step alone: the chart may show means"),
    tile("Held-out loss", s.eval_loss === undefined ? "–" : Number(s.eval_loss).toFixed(4), "text it never trains on"),
    tile("Throughput", s.tokens_per_s ? `${scaled(s.tokens_per_s)} tok/s` : "–", `${scaled(s.tokens)} tokens so far`, "of the last steps; none while the run waits"),
    tile("Peers", String(s.peers), s.no_spare ? `${plural(s.stages.length, "stage")}, no spare: the next loss stops the run` : `${plural(s.stages.length, "stage")}, ${plural(s.spares.length + s.more_spares, "spare")}`, "a spare takes over where a peer is lost"),
    tile("A crash now would cost", crash === null ? "–" : `≈ ${duration(crash)}`, crash === null ? "" : `${redo} to redo, ${restore}`, "if a stage were lost now"));
}

function stages(s) {
  if (!s.stages.length) {
    $("stages").replaceChildren(make("p", { class: "muted" }, "No stage is assigned yet."));
  } else {
    const row = [];
    s.stages.forEach((stage, i) => {
      const link = s.links[i] ? between(s.links[i], i) : null;
      row.push(make("div", { class: link ? "hop" : "hop last" }, card(stage), link));
    });
    $("stages").replaceChildren(...row);
  }
  const spares = s.spares.map((p) => make("span", { class: "chip", title: p.device }, p.name));
  if (s.more_spares) spares.push(make("span", { class: "chip" }, `and ${s.more_spares} more`));
  $("spares").replaceChildren(...(spares.length ? [make("span", { class: "muted" }, "Spares:"), ...spares] : []));
  const gone = s.gone.map((p) => make("span", { class: "chip" }, `${p.name}: ${p.how} ${duration(Math.round(p.gone_s))} ago`));
  $("gone").replaceChildren(...(gone.length ? [make("span", { class: "muted" }, "Gone:"), ...gone] : []));
}

const WENT = { away: "is away, and may come back", lost: "was lost", left: "left", kicked: "was kicked", dismissed: "was dismissed" };
const WHAT = { compute: "in the model", wait: "nothing to do: other stages or the coordinator had not sent yet", wire: "packing, or idle while its own messages were on their way out" };

function card(stage) {
  const [holder] = stage.holders, lost = stage.state === "lost", who = holder.name || holder.peer;
  const measured = stage.compute_share + stage.wait_share + stage.wire_share > 0;
  const shares = make("div", { class: "shares", "aria-hidden": "true" });
  for (const what of ["compute", "wait", "wire"]) {
    const bar = make("i", { class: what });
    bar.style.width = `${100 * stage[`${what}_share`]}%`;
    shares.append(bar);
  }
  const percents = ["compute", "wait", "wire"].map((what) =>
    make("span", { title: `share of the last step: ${WHAT[what]}` }, make("b", null, measured ? `${Math.round(100 * stage[`${what}_share`])} %` : "–"), make("i", { class: `key ${what}` }), what));
  const facts = make("dl", null);
  const fact = (name, value, title) => facts.append(make("dt", { title: title || "" }, name), make("dd", null, value));
  fact("layers", stage.end_layer - stage.first_layer === 1 ? String(stage.first_layer) : `${stage.first_layer}–${stage.end_layer - 1}`);
  if (stage.peak_memory && !lost) stage.process_memory
    ? fact("process", size(stage.peak_memory), "memory of the whole process, with Python and torch: on a CPU the stage's own is not known")
    : fact("memory", size(stage.peak_memory), "the most that the stage has taken of its device");
  if (stage.forecast_memory && !lost) fact("stage needs", size(stage.forecast_memory), "memory of the stage by forecast, at most");
  if (stage.celsius && !lost) fact("card", `${Math.round(stage.celsius)} °C, ${Math.round(stage.watts)} W`, "temperature of this peer's first card, and what it draws");
  if (holder.round_trip_s) fact("coordinator ⇄", duration(holder.round_trip_s), "a message from this peer to the coordinator and back");
  return make("article", { class: "stage", "data-state": stage.state, "aria-label": `Stage ${stage.stage}` },
    make("div", { class: "top" }, make("span", null, `Stage ${stage.stage}`), make("span", { class: "state" }, lost ? holder.presence : words(stage.state))),
    make("p", { class: "peer" }, lost && holder.presence !== "away" ? "nobody" : who),
    make("p", { class: "device" }, lost ? `${who} ${WENT[holder.presence] || "was lost"}` : holder.device),
    lost ? null : shares,
    lost ? null : make("p", { class: "percent" }, ...percents),
    facts);
}

function between(link, i) {
  const way = (arrow, perSecond, perToken, css) =>
    make("p", { class: `way ${css}` }, `${arrow} `, make("b", null, perSecond ? `${size(perSecond)}/s` : "–"), make("span", null, perToken ? ` ${figures(perToken)} B/token` : ""));
  const path = link.relayed ? "relayed" : link.path === "public" || !link.path ? "direct" : link.path === "punched" ? "punched" : `direct (${link.path === "lan" ? "LAN" : link.path})`;
  const trip = link.round_trip_s ? duration(link.round_trip_s) : "";
  return make("div", { class: "between", role: "group", "data-up": link.up, "aria-label": `Link from stage ${i} to stage ${i + 1}` },
    way("→", link.up && link.forward_per_s, link.up && link.forward_per_token, ""),
    way("←", link.up && link.backward_per_s, link.up && link.backward_per_token, "back"),
    make("p", { class: "kind", title: link.why || "how the two peers reach each other, and the round trip between them" },
      make("span", null, link.up ? path : "no link"), link.up && trip ? make("span", null, trip) : null));
}

function snapshots(s) {
  const parts = [];
  const newest = s.kept.length ? s.kept[s.kept.length - 1][0] : 0;
  parts.push(make("p", null, newest ? `Everything up to step ${newest.toLocaleString("en")} is saved.` : "Nothing is saved yet."));
  if (s.rollbacks) parts.push(make("p", { class: "muted" }, `Rolled back ${s.rollbacks} ×, ${plural(s.steps_redone, "step")} redone.`));
  for (const [step, here, all] of s.pending) parts.push(make("p", { class: "muted" }, `Step ${step} is being saved: ${here} of ${all} parts are here.`));
  if (s.kept.length) parts.push(make("ul", { "aria-label": "Snapshots that are kept" }, ...s.kept.map(([step]) => make("li", { class: "chip" }, `step ${step.toLocaleString("en")}`))));
  $("snapshots").replaceChildren(...parts);
}

function work(s) {
  const cells = (tag, values) => make("tr", null, ...values.map((value) => make(tag, tag === "th" ? { scope: "col" } : null, value)));
  const rows = s.work.map((c) => cells("td", [c.name || "others", c.steps.toLocaleString("en"), duration(c.seconds), size(c.sent_bytes)]));
  if (s.more_work) rows.push(make("tr", null, make("td", { colspan: "4" }, `and ${s.more_work} more`)));
  $("work").replaceChildren(rows.length
    ? make("table", null, make("thead", null, cells("th", ["peer", "steps", "time", "sent"])), make("tbody", null, ...rows))
    : make("p", { class: "muted" }, "No step is done yet."));
}

function sample(s) {
  $("sample").hidden = !s.sample;
  if (!s.sample) return;
  const { prompt, text, why, step } = s.sample;
  const rest = text.startsWith(prompt) ? text.slice(prompt.length) : text;
  $("text").replaceChildren(...(text
    ? [make("blockquote", null, make("mark", null, prompt), rest), make("p", { class: "muted" }, `by the snapshot of step ${step.toLocaleString("en")}`)]
    : [make("p", { class: "muted" }, `No sample of “${prompt}”: ${why}.`)]));
}

function banner() {
  const link = document.body.dataset.link, s = state;
  const say = (text, css) => {
    $("banner").hidden = !text;
    $("banner").className = css;
    if ($("banner").textContent !== text) $("banner").textContent = text;  // a screen reader hears what is new
  };
  if (other) return say(`Another run, ${other}, is at this address now: reload the page to see it. What follows is ${s.name}.`, "");
  if (s && s.phase === "done") return say(`The run is done: ${plural(s.step, "step")}${s.eval_loss === undefined ? "" : `, held-out loss ${Number(s.eval_loss).toFixed(4)}`}.`, "good");
  if (s && s.ended) return say(`The coordinator was stopped after step ${s.step.toLocaleString("en")}. The run can be resumed; this page then goes on.`, "");
  if (link === "gone") return say("The coordinator does not answer: it was stopped, or its machine cannot be reached. What follows is as it was last seen; this page reconnects by itself.", "bad");
  if (s && s.phase === "paused") return say(s.says ? s.says[0].toUpperCase() + s.says.slice(1) : "Paused.", "bad");
  if (s && s.phase !== "running" && s.says) return say(`Waiting for ${s.says}`, "");
  if (s && s.trouble) return say(s.trouble, "");
  if (s && s.says && s.waiting_s > 4) return say(`Waiting for ${s.says}`, "");
  return say("", "");
}

function addEvents(told, whole) {
  const list = $("events");
  if (whole) list.replaceChildren();
  if (whole) newest = 0;
  for (const event of told) {
    if (event.n <= newest) continue;
    newest = event.n;
    const at = new Date(event.at * 1000);
    const time = make("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }));
    list.prepend(make("li", { "data-kind": event.kind, class: event.grave ? "grave" : "" }, time, make("span", null, event.text)));
  }
  while (list.children.length > MOST_EVENTS) list.lastElementChild.remove();
  $("no-events").hidden = list.children.length > 0;
}

function addPoints(news) {
  for (const [name, { whole, points, width }] of Object.entries(news)) {
    const curve = curves[name];
    if (whole) curve.clear();
    for (const [step, value, count] of points) {
      // The newest point stands for the stretch of steps that is still growing.
      for (let s = step - 1; s > step - width; s--) curve.delete(s);
      curve.set(step, value);
      counts[name].set(step, count);
    }
  }
  lossChart.draw();
  speedChart.draw();
}

// Where it comes from

function setLink(link) {
  if (document.body.dataset.link !== link) {
    document.body.dataset.link = link;
    $("link-text").textContent = { live: "live", gone: "no answer", ended: "ended", connecting: "connecting" }[link];
    if (link === "gone") $("phase").className = "pill bad";
    banner();
  }
}

function listen() {
  source?.close();
  source = new EventSource("events");
  source.onmessage = (message) => {
    const { state: now, curves: news, events, whole } = JSON.parse(message.data);
    heard = performance.now();
    if (state && state.run !== now.run) {
      other = now.name;
      source.close();
      return banner();
    }
    state = now;
    addEvents(events, whole);
    addPoints(news);
    setLink(now.ended ? "ended" : "live");
    show();
    if (now.ended) source.close();
  };
  source.onerror = () => {
    if (!state?.ended) setLink("gone");
  };
}

const looking = setInterval(() => {
  if (other) return;
  const silent = performance.now() - heard;
  if (silent > SILENT_MS && !state?.ended) setLink("gone");
  if (source.readyState === EventSource.CLOSED && silent > AGAIN_MS) {
    heard = performance.now() - (state?.ended ? 0 : SILENT_MS + 1);
    listen();
  }
}, 1000);

$("grave").addEventListener("change", (e) => $("events").classList.toggle("only", e.target.checked));
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText($("join-line").textContent);
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 2000);
});
fetch("owner.json").then((answer) => answer.json()).then(({ join }) => {
  if (join) {
    $("join-line").textContent = join;
    $("join").hidden = false;
  }
}, () => {});
listen();
