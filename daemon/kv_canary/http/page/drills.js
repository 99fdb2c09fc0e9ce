// Drills and their results, and what is not covered.

for (const button of document.querySelectorAll(".drill")) {
  button.addEventListener("click", async () => {
    const body = { kind: button.dataset.kind, alert: byId("alert").checked };
    const drill = await doing(button, "The drill was not started", () => write("POST", "/v1/drills", body));
    if (drill !== null) await followDrill(drill);
  });
}

async function followDrill(drill) {
  const result = byId("drill-result");
  say(result, `Drill ${drill.id} runs…`);
  try {
    while (drill.result === "running") {
      await new Promise((wake) => setTimeout(wake, 200));
      drill = await read(`/v1/drills/${encodeURIComponent(drill.id)}`);
    }
  } catch (error) {
    say(result, `How drill ${drill.id} went is not known: ${error.message}`);
    return;
  }
  const where = drill.page === null ? "" : ` Page ${drill.page} of group ${drill.group}.`;
  const after = drill.seconds === null ? "" : ` after ${duration(drill.seconds)}`;
  const words = {
    detected: `The fault was found${after}`,
    missed: "THE FAULT WAS NOT FOUND",
    superseded: "The page was rewritten meanwhile; nothing is proven",
  };
  say(result, `${words[drill.result]}: drill ${drill.id}, ${drill.kind}.${where} ${drill.detail}`);
  result.className = { detected: "is-good", missed: "is-bad", superseded: "" }[drill.result];
  refresh();
}

function showDrills(it) {
  for (const button of document.querySelectorAll(".drill[data-kind=content]"))
    button.hidden = !it.settings.allow_content_drills;
  const last = it.drills.slice(-8).reverse();
  byId("drills").hidden = !last.length;
  rebuild(byId("drills").tBodies[0], last, () =>
    last.map((drill) =>
      make(
        "tr",
        {},
        ...[
          `${moment(drill.started_at)}${drill.automatic ? " (automatic)" : ""}`,
          `${drill.kind}${drill.alert ? ", alert" : ""}`,
          drill.group,
          drill.page ?? "–",
          drill.result,
          drill.seconds === null ? "–" : duration(drill.seconds),
        ].map((text) => make("td", { textContent: text })),
      ),
    ),
  );
}

function showUncovered(it) {
  const entries = [
    ...it.uncovered.map((one) => `${one.name}: ${one.reason}`),
    ...it.groups.flatMap((group) => group.uncovered.map((one) => `${one.name} (group ${group.name}): ${one.reason}`)),
    ...it.groups
      .filter((group) => !group.enabled)
      .map((group) => `group ${group.name}, all of it: ${group.disabled_reason || "switched off"}`),
    ...it.groups
      .filter((group) => group.coverage !== "all")
      .map((group) => `group ${group.name}: coverage is ${group.coverage}`),
    ...(it.enabled ? [] : ["everything: the canary is switched off"]),
  ];
  const texts = entries.length
    ? entries
    : [
        it.groups.length
          ? "Nothing: every tensor of every group is checked."
          : `No group is attached${it.reason ? `: ${it.reason}` : "."}`,
      ];
  rebuild(byId("uncovered"), texts, () => texts.map((text) => make("li", { textContent: text })));
}
