// Incidents: the newest ones, each an element that stays as it is, open or not, while others come.

const INCIDENTS_SHOWN = 100,
  REACTION_MS = 3000;
const incidents = new Map(); // by id, the oldest first: { incident, element }
let incidentsTotal = null,
  lookAgainAt = Infinity;

function incidentElement(incident) {
  const isDrill = incident.source === "drill";
  const summary = make(
    "summary",
    {},
    make("strong", { textContent: isDrill ? "drill" : incident.check.replace("_", " ") }),
    ` ${incident.summary} `,
    make("small", { textContent: moment(incident.found_at) }),
  );
  const stripes = incident.stripes.map((one) => `${one.name}: expected ${one.expected}, found ${one.found}`).join("\n");
  const list = make(
    "dl",
    { className: "facts" },
    ...facts([
      ["Id", incident.id],
      ["Check", `${incident.check}, ${incident.persistence}`],
      ["Page", `${incident.page} of group ${incident.group}, ${incident.page_state}`],
      ["Layers", incident.layers.join(", ")],
      ["Owner", incident.owner],
      ["Previous owner", incident.previous_owner],
      ["Owners", incident.owners > 1 ? incident.owners : null],
      ["Last seen good", incident.last_good_at === null ? "never" : moment(incident.last_good_at)],
      ["Found", moment(incident.found_at)],
      ["Engine's step", `${number(incident.engine_step)}, page changed at ${number(incident.changed_step)}`],
      ["Cause", incident.cause],
      ["Reaction", incident.reaction],
      ["Drill", incident.drill],
      ["Counted", incident.counted ? "as a mismatch" : "not as a mismatch"],
      ["Fingerprints", stripes],
    ]),
  );
  return make("details", { className: isDrill ? "incident of-drill" : "incident" }, summary, list);
}

function takeIncident(incident, isQuiet) {
  const known = incidents.get(incident.id),
    list = byId("incident-list");
  if (known && JSON.stringify(known.incident) === JSON.stringify(incident)) return;
  const element = incidentElement(incident);
  if (known) {
    element.open = known.element.open;
    known.element.replaceWith(element);
  } else {
    list.prepend(element);
    if (!isQuiet) say(byId("announce"), `New incident: ${incident.summary}`);
  }
  incidents.set(incident.id, { incident, element });
  while (incidents.size > INCIDENTS_SHOWN) {
    const [oldest, entry] = incidents.entries().next().value;
    entry.element.remove();
    incidents.delete(oldest);
  }
}

async function showIncidents(it) {
  const isFirst = incidentsTotal === null;
  if (it.incidents_total !== incidentsTotal || performance.now() > lookAgainAt) {
    if (it.incidents_total < incidentsTotal) forgetIncidents(); // another process
    // Once more a little later: what the engine did about it is known only then.
    lookAgainAt = it.incidents_total === incidentsTotal ? Infinity : performance.now() + REACTION_MS;
    const page = await read(`/v1/incidents?newest=true&limit=${INCIDENTS_SHOWN}`);
    for (const incident of page.incidents) takeIncident(incident, isFirst);
    incidentsTotal = it.incidents_total;
  }
  say(
    byId("incidents-note"),
    !it.incidents_total
      ? "None so far."
      : incidents.size < it.incidents_total
        ? `The newest ${incidents.size} of ${number(it.incidents_total)}; /v1/incidents has the others that are kept.`
        : plural(it.incidents_total, "incident"),
  );
  if (!document.hidden) stream.open([...incidents.keys()].at(-1), (incident) => takeIncident(incident, false));
}

function forgetIncidents() {
  incidents.clear();
  byId("incident-list").replaceChildren();
  stream.close();
}
