// Groups: switches, sweeps, and how many bytes are verified a second.

const SAMPLES = 120,
  RATE_SAMPLES = 6;
const samples = []; // { at, total, groups: Map of name to bytes verified }
const cards = new Map(); // by name

byId("sweep").addEventListener("click", (event) =>
  doing(event.currentTarget, "The sweep was not started", () => write("POST", "/v1/sweeps", {})),
);

function verifiedBytes(group) {
  const { sweep = 0, claim = 0, confirm = 0 } = group.counters.read_bytes;
  return sweep + claim + confirm;
}

function takeSample(it) {
  const groups = new Map(it.groups.map((group) => [group.name, verifiedBytes(group)]));
  const total = [...groups.values()].reduce((sum, value) => sum + value, 0),
    before = samples.at(-1);
  if (before && (it.tick_at < before.at || total < before.total)) samples.length = 0; // another process
  if (!before || it.tick_at > before.at) samples.push({ at: it.tick_at, total, groups });
  if (samples.length > SAMPLES) samples.shift();
}

/** Bytes a second over the last few samples; null before there are two. */
function rateOf(value) {
  const last = samples.at(-1),
    first = samples.at(-Math.min(RATE_SAMPLES, samples.length));
  return last && last.at > first.at ? Math.max(0, value(last) - value(first)) / (last.at - first.at) : null;
}

function showRate(it) {
  const rates = samples
    .slice(1)
    .map((sample, index) => (sample.total - samples[index].total) / (sample.at - samples[index].at));
  const most = Math.max(1, ...rates),
    now = rateOf((sample) => sample.total);
  const span = Math.max(rates.length - 1, 20),
    x = (index) => 120 - (rates.length - 1 - index) * (120 / span),
    y = (rate) => 31 - (rate / most) * 29;
  const points = rates.map((rate, index) => `${x(index).toFixed(1)} ${y(rate).toFixed(1)}`);
  const [area, line] = byId("spark").children;
  line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "M0 0");
  area.setAttribute("d", points.length > 1 ? `M${x(0).toFixed(1)} 32L${points.join("L")}L120 32Z` : "M0 0");
  say(byId("rate"), now === null ? "–" : `${bytes(now)}/s`);
  const budget = it.budget_bytes_per_second
    ? `budget ${it.settings.budget}, ${bytes(it.budget_bytes_per_second)}/s`
    : "no background sweeps";
  say(
    byId("rate-note"),
    rates.length
      ? `${budget} · at most ${bytes(most)}/s in the last ${duration(samples.at(-1).at - samples[0].at)}`
      : budget,
  );
  byId("spark").setAttribute(
    "aria-label",
    now === null ? "Bytes verified a second" : `Bytes verified a second: now ${bytes(now)}, at most ${bytes(most)}`,
  );
}

// Groups

function cardOf(group) {
  const kind = make("span"),
    facts = make("p", { className: "small" });
  const button = make("button", { type: "button" }, make("span", { className: "track" }));
  button.setAttribute("role", "switch");
  button.setAttribute("aria-label", `Group ${group.name}`);
  button.addEventListener("click", () => {
    const enabled = toggled(button);
    doing(button, `Group ${group.name} was not switched ${enabled ? "on" : "off"}`, () =>
      write("PATCH", `/v1/groups/${encodeURIComponent(group.name)}`, { enabled }),
    );
  });
  const bar = make("progress", { max: 1 });
  bar.setAttribute("aria-label", `Sweep of group ${group.name}`);
  const title = make("h3", {}, `${group.name} `, kind);
  const element = make("div", { className: "group" }, make("div", { className: "bar" }, title, button), bar, facts);
  byId("groups").append(element);
  return { element, button, bar, kind, facts };
}

function showGroups(it) {
  for (const [name, card] of cards) {
    if (it.groups.some((group) => group.name === name)) continue;
    card.element.remove();
    cards.delete(name);
  }
  for (const group of it.groups) {
    if (!cards.has(group.name)) cards.set(group.name, cardOf(group));
    const card = cards.get(group.name),
      sweep = group.sweep,
      rate = rateOf((sample) => sample.groups.get(group.name) || 0);
    const isSwept = it.enabled && group.enabled;
    card.button.setAttribute("aria-checked", String(group.enabled));
    card.bar.value = sweep.total ? sweep.position / sweep.total : 0;
    say(
      card.kind,
      [
        group.kind,
        `${plural(group.total_pages, "page")} of ${bytes(group.bytes_per_page)}`,
        `${plural(group.buffers, "buffer")} in ${plural(group.stripes, "stripe")}`,
        ...(group.coverage === "all" ? [] : [`coverage ${group.coverage}`]),
      ].join(" · "),
    );
    const parts = isSwept
      ? [
          `sweep at ${Math.floor(100 * card.bar.value)}%`,
          rate === null ? null : `${bytes(rate)}/s`,
          sweep.eta_seconds === null ? null : `${duration(sweep.eta_seconds)} to go`,
          sweep.last_duration_seconds === null
            ? "no pass finished yet"
            : `last pass took ${duration(sweep.last_duration_seconds)}`,
          `oldest verification ${duration(group.oldest_verification_age_seconds)}`,
          sweep.deadline_met ? null : "MISSES ITS DEADLINE",
        ]
      : [`off: ${group.disabled_reason || (it.enabled ? "switched off" : "the canary is off")}`];
    say(card.facts, parts.filter(Boolean).join(" · "));
  }
  const asked = it.sweeps.at(-1);
  const words = { running: "runs", finished: "is finished", interrupted: "was interrupted" };
  say(
    byId("sweep-result"),
    asked
      ? `Sweep ${asked.id} ${words[asked.state]}: ${Math.floor(100 * asked.progress)}%, ` +
          `${plural(asked.verified_pages, "page")} verified, ${asked.mismatches} wrong.`
      : "",
  );
}
