"use strict";
// The map of the model. What comes from the model is put into the page as text only.
(() => {
  const byId = (id) => document.getElementById(id);
  const done = () => { document.documentElement.dataset.ready = "yes"; performance.mark("ready"); };
  const source = byId("data");
  if (!source) { done(); return; }
  const data = JSON.parse(source.textContent);
  const groups = data.groups.map((g) => ({
    first: g.nodes[0], count: g.nodes.length, label: g.label, state: g.state,
    before: g.float_ms, after: g.tuned_ms, conversion: g.conversion_ms, error: g.error_db,
  }));
  const HIDDEN = ["computed in advance", "computing shapes"];
  const running = groups.filter((g) => !HIDDEN.includes(g.state)).length;
  const groupOf = new Int32Array(data.nodes.length);
  groups.forEach((g, n) => groupOf.fill(n, g.first, g.first + g.count));
  const timed = groups.some((g) => g.before !== null && g.before > 0);
  const paired = groups.some((g) => g.after !== null);
  const low = (g) => /bit/.test(g.state);
  const bits = [...new Set(groups.filter(low).map((g) => g.state))].join(" or ") || "8 bits";
  const precise = paired || groups.some(low);
  const rated = groups.some((g) => g.error !== null);

  const make = (tag, className, content) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (content !== undefined) element.textContent = content;
    return element;
  };
  const ms = (v) => v === null ? "–" : `${v >= 100 ? v.toFixed(1) : v.toFixed(3)} ms`;
  const total = (v) => v.after === null ? null : v.after + v.conversion;
  const longer = (v) => Math.max(v.before || 0, total(v) || 0);
  const gain = (v) => v.before === null || v.after === null ? null : v.before - total(v);

  // A cell is a group, or a block of groups whose values are sums.
  const groupCell = (n) => ({ ...groups[n], groups: 1, nodes: groups[n].count, first: n, last: n + 1, group: n, eight: low(groups[n]) ? 1 : 0 });
  const blockCell = (block) => {
    const cell = { label: block.label, first: block.first, last: block.last, block, nodes: 0, groups: block.last - block.first, before: null, after: null, conversion: 0, error: null, eight: 0 };
    for (let n = block.first; n < block.last; n++) {
      const g = groups[n];
      cell.nodes += g.count;
      if (g.before !== null) cell.before = (cell.before || 0) + g.before;
      if (g.after !== null) cell.after = (cell.after || 0) + g.after;
      cell.conversion += g.conversion;
      if (g.error !== null) cell.error = cell.error === null ? g.error : Math.min(cell.error, g.error);
      cell.eight += low(g) ? 1 : 0;
    }
    cell.eight /= cell.groups;
    return cell;
  };

  const whole = { label: "whole model", first: 0, last: running, blocks: data.blocks };
  let trail = [whole];
  let cells = [];
  let chosen = -1;
  let cursor = 0;
  let hits = null;

  // Colours: each way says for a cell which class it wears, and what the classes mean.
  const scale = (steps, share) => steps[Math.min(steps.length - 1, Math.floor(share * steps.length))];
  const HEAT = ["t0", "t1", "t2", "t3", "t4", "t5"];
  const ERROR = ["t0", "e1", "e2", "e3", "e4", "e5"];
  let extent = { time: 1, gain: 1 };
  const ways = {
    precision: {
      name: "precision", on: precise,
      wear: (c) => c.eight === 1 ? "q" : c.eight === 0 ? "f" : "m",
      legend: () => [["q", bits], ["f", "float"], ...(cells.some((c) => c.block) ? [["m", "both, by number of groups"]] : [])],
    },
    gain: {
      name: "time saved", on: timed && paired,
      wear: (c) => { const g = gain(c); if (g === null) return "none"; const s = g / extent.gain; return Math.abs(s) < 0.02 ? "t0" : s > 0 ? scale(["g1", "g2", "g3"], Math.sqrt(s)) : scale(["l1", "l2", "l3"], Math.sqrt(-s)); },
      legend: () => [["l3", `${ms(extent.gain)} lost`], ["l2"], ["l1"], ["t0"], ["g1"], ["g2"], ["g3", `${ms(extent.gain)} saved`]],
    },
    time: {
      name: "time", on: timed,
      wear: (c) => { const t = paired ? total(c) : c.before; return t === null ? "none" : scale(HEAT, Math.sqrt(t / extent.time)); },
      legend: () => [["t0", "0"], ["t1"], ["t2"], ["t3"], ["t4"], ["t5", `${ms(extent.time)}${paired ? `, ${data.tuned}` : ""}`]],
    },
    error: {
      name: "error", on: rated,
      wear: (c) => c.error === null ? "none" : scale(ERROR, Math.min(Math.max((60 - c.error) / 50, 0), 0.999)),
      legend: () => [["t0", "rounding it alone leaves 60 dB or more"], ["e1"], ["e2"], ["e3"], ["e4"], ["e5", "20 dB or less"]],
    },
  };
  let way = Object.keys(ways).find((name) => ways[name].on) || "precision";
  const fieldset = byId("colours");
  for (const [key, { name, on }] of Object.entries(ways)) {
    if (!on) continue;
    const label = make("label");
    const radio = make("input");
    Object.assign(radio, { type: "radio", name: "colour", value: key, checked: key === way });
    radio.addEventListener("change", () => { way = key; dress(); });
    label.append(radio, name);
    fieldset.append(label);
  }
  fieldset.hidden = fieldset.children.length < 2;

  const box = byId("cells");
  const SVG = "http://www.w3.org/2000/svg";
  const tip = byId("tip");
  const panel = byId("panel");

  const build = () => {
    const here = trail[trail.length - 1];
    const inner = here.blocks;
    cells = inner.length ? inner.map((b) => b.last - b.first === 1 ? groupCell(b.first) : blockCell(b)) : Array.from({ length: here.last - here.first }, (_, i) => groupCell(here.first + i));
    const at = new Int32Array(here.last - here.first);
    cells.forEach((c, i) => at.fill(i, c.first - here.first, c.last - here.first));
    const seen = new Set();
    cells.forEach((c) => { c.from = []; c.to = []; });
    for (const [a, b] of data.flows) {
      if (a < here.first || b < here.first || a >= here.last || b >= here.last) continue;
      const [x, y] = [at[a - here.first], at[b - here.first]];
      if (x === y || seen.has(x * cells.length + y)) continue;
      seen.add(x * cells.length + y);
      cells[x].to.push(y);
      cells[y].from.push(x);
    }
    extent = {
      time: Math.max(1e-9, ...cells.map((c) => (paired ? total(c) : c.before) || 0)),
      gain: Math.max(1e-9, ...cells.map((c) => Math.abs(gain(c) || 0))),
    };
    rank();
    box.replaceChildren();
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("aria-hidden", "true");
    box.append(svg);
    cells.forEach((c, i) => {
      const element = make("div", "cell");
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", "false");
      element.tabIndex = i === 0 ? 0 : -1;
      element.dataset.cell = i;
      c.element = element;
      box.append(element);
    });
    chosen = -1;
    cursor = 0;
    layout();
    dress();
    path();
    overview();
    mark();
  };

  // Each cell stands one step behind the last that it reads from; sources stand right before their first reader.
  const rank = () => {
    cells.forEach((c) => { c.rank = 0; });
    cells.forEach((c, i) => { for (const t of c.to) if (t > i) cells[t].rank = Math.max(cells[t].rank, c.rank + 1); });
    for (let i = cells.length - 1; i >= 0; i--) {
      const c = cells[i];
      if (!c.from.length && c.to.length) c.rank = Math.max(c.rank, Math.min(...c.to.map((t) => cells[t].rank)) - 1);
    }
    const columns = [];
    cells.forEach((c, i) => (columns[c.rank] = columns[c.rank] || []).push(i));
    for (const column of columns) {
      const taken = new Set();
      const wished = (i) => cells[i].from.length ? Math.min(...cells[i].from.map((f) => cells[f].lane ?? 0)) : 0;
      for (const i of [...(column || [])].sort((a, b) => wished(a) - wished(b) || a - b)) {
        let lane = wished(i);
        while (taken.has(lane)) lane++;
        if (lane > 0 && !taken.has(0)) lane = taken.size ? lane : 0;
        taken.add(lane);
        cells[i].lane = lane;
      }
    }
    whole.ranks = columns.length;
  };

  const layout = () => {
    const width = box.clientWidth || 640;
    const [gap, high] = [cells.length <= 60 ? 14 : 9, 26];
    // A box is as wide as its time, and no wider than the line; a column is as wide as its widest box.
    const widest = Math.min(width, 200);
    const most = Math.max(...cells.map(longer));
    cells.forEach((c) => { c.w = timed && most > 0 ? Math.max(c.block ? 96 : 16, Math.round(widest * longer(c) / most)) : 96; });
    const columns = [];
    cells.forEach((c) => { columns[c.rank] = Math.max(columns[c.rank] || 0, c.w); });
    const places = [];
    let [across, line] = [0, 0];
    columns.forEach((w, rank) => {
      if (across && across + w > width) [across, line] = [0, line + 1];
      places[rank] = [across, line];
      across += w + gap;
    });
    const lanes = [];
    cells.forEach((c) => { const at = places[c.rank][1]; lanes[at] = Math.max(lanes[at] || 0, c.lane + 1); });
    const tops = [];
    let y = 10;
    for (const count of lanes) { tops.push(y); y += (count || 0) * (high + 8) + 16; }
    cells.forEach((c) => {
      [c.x, c.line] = places[c.rank];
      c.y = tops[c.line] + c.lane * (high + 8);
      c.h = high;
      Object.assign(c.element.style, { left: `${c.x}px`, top: `${c.y}px`, width: `${c.w}px`, height: `${high}px` });
      c.element.replaceChildren(...(c.w >= 44 ? [make("bdi", "", c.label)] : []));
    });
    box.style.height = `${y}px`;
    const svg = box.firstChild;
    svg.replaceChildren();
    cells.forEach((c, i) => c.to.forEach((t) => {
      const d = cells[t];
      const line = document.createElementNS(SVG, "path");
      line.setAttribute("d", route(c, d, width));
      line.dataset.a = i;
      line.dataset.b = t;
      svg.append(line);
    }));
  };

  const route = (a, b, width) => {
    const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
    if (a.line !== b.line) return `M${x1} ${y1}H${Math.min(x1 + 7, width)}M${Math.max(x2 - 7, 0)} ${y2}H${x2}`;
    if (b.rank - a.rank === 1) return y1 === y2 ? `M${x1} ${y1}H${x2}` : `M${x1} ${y1}C${x1 + 6} ${y1} ${x2 - 6} ${y2} ${x2} ${y2}`;
    if (b.x <= a.x) return "";
    const [ax, bx, top] = [a.x + a.w - 8, b.x + 8, Math.min(a.y, b.y)];
    return `M${ax} ${a.y}C${ax} ${top - 9} ${ax + 6} ${top - 9} ${ax + 12} ${top - 7}H${bx - 12}C${bx - 6} ${top - 9} ${bx} ${top - 9} ${bx} ${b.y}`;
  };

  const describe = (c) => {
    const lines = [c.block ? `${c.label}: ${c.groups} groups, ${c.nodes} nodes` : c.label];
    if (!c.block && c.nodes > 1) lines[0] += ` (${c.nodes} nodes)`;
    if (precise) lines.push(c.block ? `${Math.round(c.eight * 100)} % of the groups in ${bits}` : c.state);
    if (c.before !== null) lines.push(paired ? `${data.before} ${ms(c.before)}, ${data.tuned} ${ms(total(c))}` : ms(c.before));
    if (c.error !== null) lines.push(`rounded alone: ${c.error >= 200 ? "no error" : c.error.toFixed(0) + " dB"}`);
    return lines;
  };

  const dress = () => {
    for (const c of cells) {
      const worn = ways[way].wear(c);
      c.element.className = `cell ${worn}${c.block ? " block" : ""}`;
      if (worn === "m") c.element.style.setProperty("--share", `${Math.round(c.eight * 100)}%`);
      c.element.setAttribute("aria-label", describe(c).join(", "));
    }
    const legend = byId("legend");
    legend.replaceChildren();
    ways[way].legend().forEach(([worn, label], i, all) => {
      const swatch = make("span", `swatch ${worn}${i && all[i - 1][1] === undefined ? " tight" : i && label === undefined ? " tight" : ""}`);
      if (label !== undefined && i && i === all.length - 1 && all[i - 1][1] === undefined) legend.append(swatch, label);
      else legend.append(...(label === undefined ? [swatch] : i === 0 && all[1] && all[1][1] === undefined ? [label, swatch] : [swatch, label]));
    });
    mark();
  };

  const mark = () => {
    box.classList.toggle("searching", hits !== null);
    if (hits !== null) cells.forEach((c) => {
      let found = false;
      for (let n = c.first; n < c.last && !found; n++) found = hits.has(n);
      c.element.classList.toggle("hit", found);
    });
  };

  const path = () => {
    const nav = byId("path");
    nav.replaceChildren();
    if (trail.length === 1) return;
    trail.forEach((step, i) => {
      if (i === trail.length - 1) { nav.append(make("span", "", step.label)); return; }
      const button = make("button", "link", step.label);
      button.addEventListener("click", () => { trail = trail.slice(0, i + 1); build(); focusCell(0); });
      nav.append(button, make("span", "", "›"));
    });
  };

  const title = (label, closable) => {
    panel.replaceChildren();
    panel.classList.toggle("open", closable);
    if (closable) {
      const close = make("button", "link close", "close");
      close.addEventListener("click", () => dismiss());
      panel.append(close);
    }
    const heading = make("h3", "", label);
    heading.id = "panel-title";
    panel.append(heading);
  };

  const rows = (pairs) => {
    const list = make("dl");
    for (const [name, value] of pairs) if (value !== null) list.append(make("dt", "", name), make("dd", "", value));
    panel.append(list);
  };

  const times = (c) => [
    [paired ? data.before : "time", c.before === null ? null : ms(c.before)],
    [data.tuned || "tuned", paired && c.after !== null ? ms(total(c)) : null],
    ["of which conversions", paired && c.conversion >= 0.0005 ? ms(c.conversion) : null],
    [gain(c) < 0 ? "lost" : "saved", gain(c) === null ? null : ms(Math.abs(gain(c)))],
    ["rounded alone", c.error === null ? null : c.error >= 200 ? "no error" : `${c.error.toFixed(1)} dB`],
  ];

  const overview = () => {
    const here = trail[trail.length - 1];
    const shown = blockCell(here);
    const all = here === whole ? blockCell({ ...here, last: groups.length }) : shown;
    title(here.label, false);
    rows([
      ["nodes", String(all.nodes)], ["groups", String(shown.groups)],
      [`groups in ${bits}`, precise ? `${Math.round(shown.eight * shown.groups)} of ${shown.groups}` : null],
      ...groups.slice(here === whole ? running : groups.length).map((g) => [g.state, `${g.count} nodes`]), ...times(all),
    ]);
    panel.append(make("p", "soft", cells.some((c) => c.block) ? "Choose a block to open it." : "Choose a group to see its nodes."));
  };

  const neighbours = (name, numbers) => {
    if (!numbers.length) return;
    panel.append(make("h4", "", name));
    const list = make("ul");
    for (const n of numbers.slice(0, 12)) {
      const item = make("li");
      const button = make("button", "link", `${groups[n].label} · ${data.nodes[groups[n].first].name}`);
      button.addEventListener("click", () => open(n));
      item.append(button);
      list.append(item);
    }
    if (numbers.length > 12) list.append(make("li", "soft", `and ${numbers.length - 12} more`));
    panel.append(list);
  };

  const detail = (n) => {
    const g = groups[n];
    title(g.label, true);
    const tag = make("span", `tag${low(g) ? " q" : ""}`, g.state);
    const line = make("p");
    line.append(tag);
    if (precise || HIDDEN.includes(g.state)) panel.append(line);
    rows(times({ ...g }));
    panel.append(make("h4", "", g.count === 1 ? "Node" : `${g.count} nodes`));
    const list = make("ul");
    for (const node of data.nodes.slice(g.first, g.first + Math.min(g.count, 100))) {
      const item = make("li");
      item.append(make("bdi", "", node.name), make("span", "soft", ` ${node.op} `));
      if (precise && g.count > 1) item.append(make("span", `tag${low(node) ? " q" : ""}`, node.state));
      if (node.why) item.append(make("div", "soft", node.why));
      list.append(item);
    }
    if (g.count > 100) list.append(make("li", "soft", `and ${g.count - 100} more`));
    panel.append(list);
    const from = [], to = [];
    for (const [a, b] of data.flows) {
      if (b === n) from.push(a);
      if (a === n) to.push(b);
    }
    neighbours("Reads from", from);
    neighbours("Is read by", to);
  };

  const choose = (i) => {
    if (cells[chosen]) cells[chosen].element.setAttribute("aria-selected", "false");
    chosen = i;
    for (const line of box.firstChild.children) line.classList.toggle("near", Number(line.dataset.a) === i || Number(line.dataset.b) === i);
    if (i >= 0) { 
      cells[i].element.setAttribute("aria-selected", "true");
      detail(cells[i].group);
      if (getComputedStyle(panel).position === "fixed") cells[i].element.scrollIntoView({ block: "start" });
    }
  };

  const dismiss = () => {
    const back = chosen;
    choose(-1);
    overview();
    focusCell(back >= 0 ? back : cursor);
  };

  const enter = (i) => {
    const c = cells[i];
    if (!c.block) { choose(i); return; }
    trail = [...trail, c.block];
    build();
    focusCell(0);
  };

  const leave = () => {
    if (chosen >= 0) { dismiss(); return; }
    if (trail.length === 1) return;
    const { first } = trail[trail.length - 1];
    trail = trail.slice(0, -1);
    build();
    focusCell(cells.findIndex((c) => c.first <= first && first < c.last));
  };

  const focusCell = (i) => {
    if (!cells[i]) return;
    cells[cursor].element.tabIndex = -1;
    cursor = i;
    cells[i].element.tabIndex = 0;
    cells[i].element.focus();
  };

  // Show a group wherever it is: go down to its block first.
  const open = (n) => {
    let steps = [whole];
    let inner = whole.blocks;
    while (inner.length) {
      const next = inner.find((b) => b.first <= n && n < b.last);
      if (!next || next.last - next.first === 1) break;
      steps.push(next);
      inner = next.blocks;
    }
    if (n >= running) { detail(n); return; }
    if (steps.length !== trail.length || steps[steps.length - 1].first !== trail[trail.length - 1].first) { trail = steps; build(); }
    const i = cells.findIndex((c) => c.group === n);
    focusCell(i);
    choose(i);
  };

  const beside = (i, dx, dy) => {
    const a = cells[i];
    let best = -1, least = Infinity;
    cells.forEach((b, j) => {
      const [x, y] = [b.x - a.x, b.y - a.y];
      if (j === i || (dx ? Math.sign(x) !== dx || Math.abs(y) > a.h : Math.sign(y) !== dy)) return;
      const far = dx ? Math.abs(x) + 4 * Math.abs(y) : 4 * Math.abs(y) + Math.abs(x);
      if (far < least) [best, least] = [j, far];
    });
    return best;
  };

  box.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const i = cursor;
    let next = null;
    if (event.key in moves) {
      next = beside(i, ...moves[event.key]);
      if (next < 0 && moves[event.key][0]) next = cells.findIndex((c) => c.rank === cells[i].rank + moves[event.key][0]);
    } else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = cells.length - 1;
    else if (event.key === "Enter" || event.key === " ") enter(i);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
    if (next !== null && next >= 0) focusCell(next);
  });
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") dismiss(); });
  const cellOf = (event) => { const e = event.target.closest(".cell"); return e ? Number(e.dataset.cell) : -1; };
  box.addEventListener("click", (event) => { const i = cellOf(event); if (i >= 0) { hide(); focusCell(i); enter(i); } });

  const show = (i, x, y) => {
    tip.textContent = describe(cells[i]).join("\n");
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
  };
  const hide = () => { tip.hidden = true; };
  box.addEventListener("pointermove", (event) => { const i = cellOf(event); if (i >= 0 && event.pointerType !== "touch") show(i, event.clientX, event.clientY); else hide(); });
  box.addEventListener("pointerleave", hide);
  box.addEventListener("focusin", (event) => {
    const i = cellOf(event);
    if (i >= 0 && event.target.matches(":focus-visible")) { const r = event.target.getBoundingClientRect(); show(i, r.left, r.bottom - 14); }
  });
  box.addEventListener("focusout", hide);

  const query = byId("query");
  const search = () => {
    const wanted = query.value.trim().toLowerCase();
    const list = byId("hits");
    list.replaceChildren();
    hits = null;
    byId("found").textContent = "";
    if (wanted) {
      hits = new Set();
      let count = 0;
      data.nodes.forEach((node, n) => {
        if (!node.name.toLowerCase().includes(wanted) && node.op.toLowerCase() !== wanted) return;
        count++;
        hits.add(groupOf[n]);
        if (count > 40) return;
        const item = make("li");
        const button = make("button", "link", node.name);
        button.addEventListener("click", () => open(groupOf[n]));
        item.append(button, make("span", "soft", ` ${node.op}`));
        list.append(item);
      });
      byId("found").textContent = `${count} ${count === 1 ? "node" : "nodes"} in ${hits.size} ${hits.size === 1 ? "group" : "groups"}${count > 40 ? ", the first 40 below" : ""}`;
    }
    mark();
  };
  query.addEventListener("input", search);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && hits && hits.size) open(hits.values().next().value);
    if (event.key === "Escape") { query.value = ""; search(); }
  });

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-group]");
    if (!link) return;
    byId("map").scrollIntoView();
    open(Number(link.dataset.group));
  });
  let drawn = 0;
  new ResizeObserver(() => { if (Math.abs(box.clientWidth - drawn) > 4) { drawn = box.clientWidth; layout(); } }).observe(box);
  addEventListener("beforeprint", () => { layout(); });
  drawn = box.clientWidth;
  build();
  done();
})();
