// What is shown, and when it is asked for: the status once a second, the map with it, incidents as they come.

const POLL_MS = 1000,
  SLOWEST_POLL_MS = 30000,
  STALE_SECONDS = 10;

let status = null,
  failures = 0,
  timer = null,
  tick = 0;

// Writes

const busy = new Set(); // buttons whose answer is under way

async function doing(button, what, work) {
  busy.add(button);
  button.disabled = true;
  try {
    const answer = await work();
    if (answer !== null) say(byId("notice"), "");
    return answer;
  } catch (refusal) {
    say(byId("notice"), `${what}: ${refusal.message}`);
    return null;
  } finally {
    busy.delete(button);
    button.disabled = false;
    refresh();
  }
}

const toggled = (button) => button.getAttribute("aria-checked") !== "true";

byId("master").addEventListener("click", (event) => {
  const enabled = toggled(event.currentTarget);
  doing(event.currentTarget, `The canary was not switched ${enabled ? "on" : "off"}`, () =>
    write("PUT", "/v1/canary", { enabled }),
  );
});

// The state as a whole

function stateOf(it) {
  if (it.state === "failed" || it.state === "stopped") return it.state;
  if (call.now - it.tick_at > STALE_SECONDS) return "stale";
  return it.state === "running" && (it.reason || "").startsWith("suspended") ? "suspended" : it.state;
}

function showState(it) {
  const state = stateOf(it);
  const badge = byId("state");
  say(badge, state);
  badge.dataset.state = state;
  say(byId("version"), it.version);
  say(
    byId("subject"),
    [
      `${it.engine} ${it.engine_version}`,
      it.device,
      `rank ${it.rank}`,
      `pid ${it.pid}`,
      `step ${number(it.engine_step)}`,
    ].join(" · "),
  );
  document.title = `${realMismatches(it) ? "⚠ " : ""}KV Canary ${it.engine} rank ${it.rank}`;
  const master = byId("master");
  master.setAttribute("aria-checked", String(it.enabled));
  master.disabled = busy.has(master);
  const silence = duration(call.now - it.tick_at);
  const problem =
    state === "stale"
      ? `The canary thread last went round ${silence} ago: nothing is guarded, and what is shown is old.`
      : state === "failed" || state === "stopped"
        ? `The canary ${state}: ${it.reason || "no reason known"}. The engine goes on without it.`
        : "";
  showProblem(problem);
  const warnings = [
    // of the other states the badge, a banner or a warning tells already
    ...(it.reason && (state === "waiting" || state === "disabled") ? [`${it.state}: ${it.reason}`] : []),
    ...it.warnings,
    ...it.last_errors.slice(-3).map((error) => `an error of the canary itself: ${error}`),
  ];
  rebuild(byId("warnings"), warnings, () => warnings.map((text) => make("li", { textContent: text })));
  byId("warnings").hidden = !warnings.length;
  const wrong = realMismatches(it);
  const verdict = byId("verdict");
  say(
    verdict,
    wrong ? `${number(wrong)} mismatch${wrong === 1 ? "" : "es"} found. The incidents below say where.` : "",
  );
  verdict.hidden = !wrong;
}

function showProblem(text) {
  say(byId("problem"), text);
  byId("problem").hidden = !text;
}

const counted = (it, source) =>
  it.groups
    .flatMap((group) => group.counters.mismatches)
    .reduce((sum, entry) => sum + (entry.source === source ? entry.count : 0), 0);
const realMismatches = (it) => counted(it, "real");

function showNumbers(it) {
  const wrong = realMismatches(it),
    rehearsed = counted(it, "drill"),
    found = byId("mismatches");
  say(found, number(wrong));
  found.className = wrong ? "is-bad" : "";
  say(
    byId("mismatches-note"),
    rehearsed ? `and ${plural(rehearsed, "drill")} with an alert` : "real ones, since the start",
  );
  const oldest = Math.max(0, ...it.groups.map((group) => group.oldest_verification_age_seconds)),
    deadline = it.settings.sweep_deadline;
  const late = it.groups.some((group) => !group.sweep.deadline_met);
  say(byId("age"), it.enabled && it.groups.length ? duration(oldest) : "–");
  byId("age").className = late ? "is-bad" : "";
  say(byId("age-note"), `${late ? "misses the deadline of" : "deadline"} ${duration(deadline)}`);
  const pages = it.groups.reduce((sum, group) => sum + (group.pages.sealed || 0) + (group.pages.free || 0), 0);
  const size = it.groups.reduce(
    (sum, group) => sum + ((group.pages.sealed || 0) + (group.pages.free || 0)) * group.bytes_per_page,
    0,
  );
  say(byId("guarded"), bytes(size));
  say(byId("guarded-note"), plural(pages, "page"));
}

async function showRanks() {
  const targets = (await read("/v1/targets")).flatMap((entry) => entry.targets);
  byId("ranks").hidden = targets.length < 2;
  rebuild(byId("ranks"), targets, () =>
    targets.map((target, index) => {
      const link = make("a", { href: `http://${target}/`, textContent: `rank ${index} · ${target}` });
      if (target.split(":").at(-1) === location.port) link.setAttribute("aria-current", "page");
      return link;
    }),
  );
}

// Round and round

function show(it) {
  takeSample(it);
  showState(it);
  showNumbers(it);
  showRate(it);
  showGroups(it);
  showDrills(it);
  showUncovered(it);
}

async function poll() {
  try {
    status = await read("/v1/status");
    failures = 0;
    show(status);
    await Promise.all([showMap(), showIncidents(status), tick % 30 ? null : showRanks()]);
    tick += 1;
  } catch (error) {
    failures += 1;
    stream.close();
    const badge = byId("state");
    say(badge, "unreachable");
    badge.dataset.state = "unreachable";
    showProblem(`The server does not answer (${error.message}). What is shown is old; it is asked again.`);
  }
}

let polling = false,
  again = false;

/** Asks now, or once more when an answer is under way; then at intervals that grow while nobody answers. */
async function refresh() {
  if (polling) {
    again = true;
    return;
  }
  clearTimeout(timer);
  polling = true;
  do {
    again = false;
    await poll();
  } while (again);
  polling = false;
  if (!document.hidden) timer = setTimeout(refresh, Math.min(SLOWEST_POLL_MS, POLL_MS * 2 ** Math.min(failures, 6)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    refresh();
    return;
  }
  clearTimeout(timer);
  stream.close();
});

refresh();
