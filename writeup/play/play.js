// Playable parts of the page: looks up what Python computed, and draws it. No formula of the cost model is here.
"use strict";

// The cell of a layout in data[table], whose last axis changes fastest; choice: position on each axis by its name.
function lookup(data, table, choice) {
  const sizes = Object.fromEntries(data.axes.map(([name, , values]) => [name, values.length]));
  return data[table].cells[data[table].axes.reduce((index, name) => index * sizes[name] + choice[name], 0)];
}

function make(tag, attributes, ...children) {
  const svg = ["svg", "rect", "text", "g", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A control: a slider over numbers, a menu of words. changed(position) is called when it moves.
function control(label, values, first, changed) {
  const numbers = values.every(each => typeof each === "number");
  const shown = make("output", {}, String(values[first]));
  const input = numbers ? make("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: first })
    : make("select", {}, ...values.map((each, i) => make("option", { value: i }, String(each))));
  input.value = first;
  const tell = () => { shown.textContent = values[input.value]; input.setAttribute("aria-valuetext", values[input.value]); };
  input.addEventListener("input", () => { tell(); changed(Number(input.value)); });
  tell();
  return make("label", {}, make("span", {}, label, ...(numbers ? [": ", shown] : [])), input);
}

const digits = number => Number(number.toPrecision(3)).toLocaleString("en");
const duration = ms => ms >= 1000 ? `${digits(ms / 1000)} s` : `${digits(ms)} ms`;
const size = bytes => bytes >= 1024 ? `${digits(bytes / 1024)} KiB` : `${bytes} bytes`;
const hatch = colour => colour === "#FFFFFF" ? "repeating-linear-gradient(45deg, #fff 0 3px, #888 3px 5px)" : colour;

// A bar of parts [label, colour, number], drawn to a scale, and its legend; parts of nothing are left out.
function bar(parts, scale, text, marks) {
  const there = parts.filter(([, , number]) => number > 0);
  const pieces = there.map(([label, colour, number]) =>
    make("span", { style: `width:${100 * number / scale}%;background:${hatch(colour)}`, title: `${label}: ${text(number)}` }));
  const legend = there.map(([label, colour, number]) =>
    make("li", {}, make("i", { style: `background:${hatch(colour)}` }), `${label} `, make("b", {}, text(number))));
  const lines = marks.map(([from, to]) =>
    make("span", { class: "mark", style: `left:${100 * from / scale}%;width:${100 * (to - from) / scale}%` }));
  return [make("div", { class: "bar", "aria-hidden": "true" }, ...pieces, ...lines), make("ul", { class: "legend" }, ...legend)];
}

function layoutPart(data, into) {
  const choice = Object.fromEntries(data.axes.map(([name, , , , first]) => [name, first]));
  const out = make("div", { class: "result", "aria-live": "polite" });
  const fields = data.axes.map(([name, label, values, , first]) =>
    control(label, values, first, position => { choice[name] = position; show(); }));
  const value = name => data.axes.find(each => each[0] === name)[2][choice[name]];
  function show() {
    const words = [data.command, ...data.axes.map(([name, , , options]) => options[choice[name]])];
    const held = lookup(data, "memory", choice), timed = lookup(data, "time", choice);
    const ask = make("p", { class: "command" }, "The same from the command line: ", make("code", {}, ...words.flatMap(each => [make("span", {}, each), " "])));
    if (typeof held === "number") {
      out.replaceChildren(make("p", { class: "refused" }, make("b", {}, "Refused: "), `${data.texts[held]}.`), ask);
      return;
    }
    const [ranks, microbatches, stage, total, least, most, ...bytes] = held, [memory, usable] = data.machines[choice.machine];
    const times = data.parts.length, [step, low, high, mfu, verdict] = timed.slice(times), notes = timed.slice(times + 5);
    const [stack, basis] = data.stacks[choice.zero];
    const gib = number => `${digits(number)} GiB`;
    const needs = `it needs ${gib(total)} on a rank of stage ${stage}, and of the ${gib(memory)} of an accelerator (${value("machine")}) ${gib(usable)} are usable`;
    out.replaceChildren(
      make("p", { class: verdict === 2 ? "fits" : "refused" }, make("b", {}, data.verdicts[verdict]),
        `${needs}. ${ranks.toLocaleString("en")} accelerators, ${microbatches} microbatches a replica.`),
      make("h4", {}, "Memory of the fullest rank ", make("small", {}, `lines: ${digits(least)} to ${gib(most)} (${basis}); ${gib(usable)} are usable`)),
      ...bar(data.held.map(([label, colour], i) => [label, colour, bytes[i]]), Math.max(most, memory), gib, [[usable, usable], [least, most]]),
      make("h4", {}, `${verdict ? "Step" : "Step, if it fitted"}: ${duration(step)} `, make("small", {}, `line: ${duration(low)} to ${duration(high)}, ${notes.length ? "a tenth wider on each side than" : "in"} which four of five ${stack} runs fell that were left out of the fit; MFU ${digits(mfu)}%`)),
      ...bar(data.parts.map(([label, colour], i) => [label, colour, timed[i]]), high, duration, [[low, high]]),
      ...(notes.length ? [make("p", {}, make("b", {}, "Outside what was fitted: "), `${notes.map(each => data.texts[each]).join("; ")}.`)] : []), ask);
  }
  into.append(make("div", { class: "controls" }, ...fields), out);
  show();
}

function pipelinePart(data, into) {
  const { names, stages, microbatches, played, first } = data.pipelines, choice = [...first], out = make("div", { class: "result" });
  const fields = [["Schedule", names], ["Stages", stages], ["Microbatches", microbatches]].map(([label, values], i) =>
    control(label, values, first[i], position => { choice[i] = position; show(); }));
  const colours = ["#0072B2", "#D55E00", "#009E73"], kinds = ["forward", "backward", "gradients of weights"], high = 26;
  function show() {
    const found = played[`${names[choice[0]]} ${stages[choice[1]]} ${microbatches[choice[2]]}`];
    if (typeof found === "string") {
      out.replaceChildren(make("p", { class: "refused" }, make("b", {}, "Refused: "), `${found}.`));
      return;
    }
    const [rows, idle, live, end] = found, split = rows[0].some(each => each[0] === 2), chunks = rows[0].some(each => each[2]), unit = 800 / end;
    const svg = make("svg", { viewBox: `-62 0 970 ${rows.length * high}`, role: "img", "aria-label": `Timeline of ${rows.length} stages, idle for ${idle}% of the time` });
    rows.forEach((row, stage) => {
      svg.append(make("text", { x: -60, y: stage * high + 17 }, `stage ${stage}`), make("text", { x: 806, y: stage * high + 17 }, `keeps ${live[stage]}`));
      svg.append(make("rect", { x: 0, y: stage * high + 2, width: 800, height: high - 4, class: "idle" }));
      for (const [kind, number, chunk, from, to] of row) {
        const width = (to - from) * unit, x = from * unit, said = `${kinds[kind]} of microbatch ${number}, chunk ${chunk}: ${from} to ${to}`;
        const box = make("rect", { x, y: stage * high + 2, width, height: high - 4, fill: colours[kind], "fill-opacity": 1 - 0.35 * chunk });
        svg.append(make("g", {}, make("title", {}, said), box, ...(width > 13 ? [make("text", { x: x + width / 2, y: stage * high + 17, class: "in" }, number)] : [])));
      }
    });
    const legend = kinds.slice(0, split ? 3 : 2).map((kind, i) => make("li", {}, make("i", { style: `background:${colours[i]}` }), split && i === 1 ? "gradients of inputs" : kind));
    out.replaceChildren(
      make("p", {}, make("b", {}, `Idle for ${idle}% of all stages' time. `), `It ends at ${end}, where a forward through a stage takes 2 and a backward 4. Keeps: most forwards whose backward has not ended${chunks ? ", each of a chunk: half of a stage's layers, the second half in paler boxes" : ""}.`),
      make("div", { class: "wide", tabindex: 0, "aria-label": "Timeline" }, svg), make("ul", { class: "legend" }, ...legend));
  }
  into.append(make("div", { class: "controls" }, ...fields), out);
  show();
}

function stepsPart(data, into) {
  const { states, whole, rows } = data.steps, names = Object.keys(rows), kinds = ["parameters", "gradients", "AdamW's state"];
  const colours = ["none", "#0072B2", "#56B4E9", "#E69F00", "repeating-linear-gradient(45deg, #D55E00 0 4px, #f3b48c 4px 8px)", "#009E73"];
  let name = names[0], place = 0;
  const list = make("select", { size: 14, "aria-label": "Events of the step" }), ranks = make("div", { class: "ranks" });
  const said = make("p", { "aria-live": "polite" });
  const box = (kind, layer, [bytes, state], before) => make("div", { class: before.join() === [bytes, state].join() ? "box" : "box changed", title: `layer ${layer}, ${kinds[kind]}: ${states[state]}` },
    make("span", { style: `height:${Math.min(100, 100 * bytes / whole[kind])}%;background:${colours[state]}` }), make("small", {}, bytes ? size(bytes) : ""));
  function show() {
    const all = rows[name], [what, sent, soFar, ...held] = all[place], before = all[Math.max(0, place - 1)].slice(3);
    list.value = place;
    back.disabled = place === 0;
    next.disabled = place === all.length - 1;
    said.replaceChildren(make("b", {}, `${place + 1} of ${all.length}: ${what}. `), sent ? `Each rank sends ${size(sent)}, ` : "Nothing is sent, ", `${size(soFar)} so far.`);
    ranks.replaceChildren(...held.map((rank, r) => make("div", { class: "rank" }, make("b", {}, `rank ${r}`),
      ...rank.flatMap((layers, kind) => [make("span", {}, kinds[kind]), ...layers.map((each, layer) => box(kind, layer, each, before[r][kind][layer]))]),
      make("span"), ...rank[0].map((_, layer) => make("small", {}, `layer ${layer}`)))));
  }
  function move(to) {
    place = Math.max(0, Math.min(rows[name].length - 1, to));
    show();
  }
  function choose(position) {
    name = names[position];
    list.replaceChildren(...rows[name].map(([what], i) => make("option", { value: i }, `${i + 1}. ${what}`)));
    move(0);
  }
  const back = make("button", { type: "button" }, "◀ back"), next = make("button", { type: "button" }, "next ▶");
  back.addEventListener("click", () => move(place - 1));
  next.addEventListener("click", () => move(place + 1));
  list.addEventListener("input", () => move(Number(list.value)));
  into.tabIndex = 0;
  into.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    move(place + by);
  });
  const legend = states.slice(1).map((state, i) => make("li", {}, make("i", { style: `background:${colours[i + 1]}` }), state));
  into.append(make("div", { class: "controls" }, control("Wrapper", names, 0, choose), make("div", { class: "buttons" }, back, next)),
    make("div", { class: "result" }, said, make("div", { class: "stepping" }, list, ranks), make("ul", { class: "legend" }, ...legend)));
  choose(0);
}

if (typeof document !== "undefined") {
  const data = JSON.parse(document.getElementById("playdata").textContent);
  for (const [name, part] of Object.entries({ layout: layoutPart, pipeline: pipelinePart, steps: stepsPart })) {
    const into = document.getElementById(`play-${name}`);
    if (!into) continue;
    into.classList.add("on");
    part(data, into);
  }
}
