// The panel around the map: legend, details of a page, the table that says the same.

const LARGE_MAP_PAGES = 200000; // such a map is asked for every other second

const map = new PageMap(byId("map"), {
  choose: (index) => say(byId("cell"), describeCell(index)),
  look: (index) => showPage(map.pages(index)[0]),
});

function describeCell(index) {
  const [first, last] = map.pages(index);
  const named = [...incidents.values()]
    .map((entry) => entry.incident)
    .filter((one) => one.group === map.map.group && one.page >= first && one.page <= last);
  const which = first === last ? `Page ${first}` : `Pages ${first} to ${last}, at worst`;
  return `${which}: ${map.words(index)}${
    named.length
      ? ` (${named
          .slice(-3)
          .map((one) => one.id)
          .join(", ")})`
      : ""
  }`;
}

async function showPage(page) {
  const list = byId("page"),
    group = map.map?.group;
  if (!group) return;
  try {
    const it = await read(`/v1/groups/${encodeURIComponent(group)}/pages/${page}`);
    list.replaceChildren(
      ...facts([
        ["Page", `${it.page} of group ${it.group}`],
        ["State", STATE_WORDS[it.state]],
        ["Verified", it.age_seconds === null ? "not now" : `${duration(it.age_seconds)} ago`],
        ["Owner", it.owner || (it.owners ? `${it.owners} requests` : "nobody")],
        ["Owners", it.owners > 1 ? it.owners : null],
        ["Previous owner", it.previous_owner],
        ["Changed", `at step ${number(it.changed_step)}, generation ${it.generation}`],
      ]),
    );
  } catch (error) {
    list.replaceChildren(
      ...facts([
        ["Page", `${page} of group ${group}`],
        ["Not known", error.message],
      ]),
    );
  }
  list.hidden = false;
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const page = Number(byId("find-page").value),
    index = map.map && map.cell(page);
  if (index !== null) map.point(index);
  showPage(page);
});

byId("map-group").addEventListener("change", () => {
  byId("page").hidden = true;
  say(byId("cell"), "");
  map.map = null;
  showMap();
});

async function showMap() {
  const select = byId("map-group"),
    names = status.groups.map((group) => group.name);
  rebuild(select, names, () => names.map((name) => make("option", { value: name, textContent: name })));
  byId("map-group-label").hidden = names.length < 2;
  const group = status.groups.find((one) => one.name === select.value);
  byId("find").hidden = byId("map-frame").hidden = !group;
  if (!group) {
    say(byId("map-note"), "No group is attached.");
    return;
  }
  if (map.map && group.total_pages > LARGE_MAP_PAGES && tick % 2) return;
  let found;
  try {
    found = await read(`/v1/groups/${encodeURIComponent(group.name)}/pages`);
  } catch (error) {
    say(byId("map-note"), `The map is not known now: ${error.message}`);
    return;
  }
  if (select.value !== group.name) return;
  map.show(found, status.enabled && group.enabled ? group.sweep.position : null);
  const each = found.pages_per_cell;
  say(
    byId("map-note"),
    each > 1
      ? `${number(found.pages)} pages, ${each} a cell; a cell shows its worst page.`
      : `${plural(found.pages, "page")}, in address order; the framed one is where the sweep is.`,
  );
  byId("map").setAttribute(
    "aria-label",
    `Pages of group ${group.name}: ${number(found.pages)} pages, ` +
      `${number(found.mismatched_pages)} with a mismatch. A table follows.`,
  );
  showLegend(found);
}

function showLegend(found) {
  const sum = (state, from, to) =>
    (found.counts[state] || []).slice(from, to).reduce((total, count) => total + count, 0);
  const deadline = found.age_bounds_seconds[2];
  const entries = [
    ["mismatch", "mismatch", found.mismatched_pages, true],
    ["drill", "drilled", found.drilled_pages, false],
    ["sealed-0", `complete, verified in the last ${duration(found.age_bounds_seconds[0])}`, sum("sealed", 0, 1), true],
    ["sealed-2", `… in the last ${duration(deadline)}`, sum("sealed", 1, 3), true],
    ["sealed-4", "… overdue", sum("sealed", 3, 5), false],
    ["sealed-7", "complete, not verified yet", sum("sealed", 5), false],
    ["free-0", "free, verified", sum("free", 0, 3), false],
    ["free-4", "free, overdue", sum("free", 3, 5), false],
    ["free-7", "free, not verified yet", sum("free", 5), false],
    ["open", STATE_WORDS.open, sum("open"), false],
    ["loading", STATE_WORDS.loading, sum("loading"), false],
    ["unknown", STATE_WORDS.unknown, sum("unknown"), false],
    ["elsewhere", STATE_WORDS.elsewhere, sum("elsewhere"), false],
  ].filter(([, , count, always]) => count || always);
  rebuild(byId("legend"), entries, () =>
    entries.map(([colour, words, count]) => {
      const swatch = make("span", { className: colour === "drill" ? "swatch ring" : "swatch" });
      swatch.style[colour === "drill" ? "borderColor" : "background"] = `var(--${colour})`;
      return make("li", {}, swatch, `${words} `, make("b", { textContent: number(count) }));
    }),
  );
  const bounds = found.age_bounds_seconds.map(duration);
  const heads = ["State", ...bounds.map((bound) => `< ${bound}`), `≥ ${bounds.at(-1)}`, "not verified"];
  rebuild(byId("counts"), [heads, found.counts], () => [
    make("caption", { textContent: "Pages by state, and by the time since each was last seen good" }),
    make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", textContent: text })))),
    make(
      "tbody",
      {},
      ...found.states.map((state) =>
        make(
          "tr",
          {},
          make("th", { scope: "row", textContent: STATE_WORDS[state] }),
          ...found.counts[state].map((count) => make("td", { textContent: number(count) })),
        ),
      ),
    ),
  ]);
}
