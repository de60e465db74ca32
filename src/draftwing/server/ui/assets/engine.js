// The engine as it runs: one snapshot a second, for as long as somebody looks.

import { stream } from "./api.js";
import { columns, lines, shares, timeline } from "./charts.js";
import { byId, h, number } from "./dom.js";

const SPAN = 120; // snapshots that the charts show
const AGAIN = 3000; // milliseconds until it is asked again
const OLD = 3; // seconds from which on numbers are not those of now
const STATES = { up: "running", busy: "busy", down: "down" };

export class Engine {
  constructor(facts) {
    this.facts = facts;
    this.seen = []; // snapshots with rates, the newest last
    this.stopper = null;
    this.message = h("p", { class: "nothing" }, "Waiting for the engine.");
    byId("engine").append(this.message);
  }

  /** Looks as long as it is asked to. */
  async look() {
    if (this.stopper) return;
    this.stopper = new AbortController();
    const { signal } = this.stopper;
    while (!signal.aborted) {
      try {
        await stream("/ui/engine", undefined, (snapshot) => this.take(snapshot), signal);
      } catch (error) {
        if (signal.aborted) return;
        state("down");
        this.message.textContent = error.message;
        this.message.hidden = false;
      }
      await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
    }
  }

  leave() {
    this.stopper?.abort();
    this.stopper = null;
  }

  take(snapshot) {
    state(snapshot.engine);
    this.message.textContent = stale(snapshot);
    this.message.hidden = !this.message.textContent;
    if (!snapshot.totals) return;
    if (snapshot.explain?.options.length) this.chosen = snapshot.explain;
    const before = this.seen.at(-1);
    snapshot.rates = before ? rates(before, snapshot) : {};
    this.seen.push(snapshot);
    if (this.seen.length > SPAN) this.seen.shift();
    this.draw(snapshot);
  }

  draw(now) {
    const series = (what) => this.seen.map(what);
    const span = Math.max(this.seen.length, SPAN / 4);
    const cards = [
      card("third", "Tokens per second", big(number(now.rates.tokens), "in the last second"),
        sub(now.speedup ? `Recent speedup from drafts: about ${number(now.speedup, 2)}×` : ""),
        lines([[series((one) => one.rates.tokens), ""]], span, "Tokens per second")),
      card("third", "Requests", big(number(now.running), `running, ${number(now.waiting)} waiting`), sub(""),
        lines([[series((one) => one.running), ""], [series((one) => one.waiting), "second"]], span, "Requests", 2)),
      card("third", "Acceptance length", big(number(now.rates.accept, 2), "tokens per step, the last seconds"), sub(""),
        lines([[series((one) => one.rates.accept), ""]], span, "Acceptance length", 2)),
      ...(now.learning ? [card("all", "Draft head: acceptance length over the last hours", head(now.learning))] : []),
      card("", "KV pool", pool(now.kv)),
      card("", "Where the time goes", stages(this.seen)),
      card("", "Drafts accepted, by depth", depths(now.drafters)),
      card("", "Prefix cache", cache(now.totals)),
      card("all", "Draft shape: costs and choice", policy(now.explain, this.chosen)),
      card("all", `Requests${now.unfinished > now.requests.length ? `, ${now.requests.length} of ${now.unfinished}` : ""}`,
        requests(now.requests, this.facts.shows_texts)),
    ];
    byId("engine").replaceChildren(this.message, h("div", { class: "cards" }, cards));
  }
}

function state(name) {
  byId("state").dataset.state = name;
  byId("state").textContent = STATES[name];
}

/** What a viewer must know before the numbers; nothing where they are of now. */
function stale({ engine, age, totals }) {
  const old = totals && age >= OLD ? ` These are its numbers of ${number(age)} s ago.` : "";
  if (engine === "down") return `The engine has stopped, and another one is being started.${old}`;
  return old && `The engine does not answer.${old}`;
}

const card = (size, title, ...inside) => h("section", { class: `card ${size}` }, h("h2", {}, title), inside);
const big = (value, words) => h("p", { class: "big" }, value, " ", h("small", {}, words));
const sub = (words) => h("p", { class: "sub" }, words);

/** What happened between two snapshots, per second. Totals begin again when the engine is replaced. */
function rates(before, now) {
  const seconds = now.time - before.time;
  const more = (name) => Math.max(now.totals[name] - before.totals[name], 0);
  const rows = more("verified_rows");
  const recent = rows ? more("committed_tokens") / rows : null;
  return { tokens: more("committed_tokens") / seconds, accept: recent ?? (now.running ? before.rates?.accept ?? null : null) };
}

function pool({ capacity, used, cached, free }) {
  const percent = (part) => `${number((100 * part) / capacity)}%`;
  return [big(percent(used), `of ${number(capacity)} tokens`), ...shares([
    ["s-used", "running requests", used, number(used)], ["s-cached", "cached prefixes", cached, number(cached)],
    ["s-free", "free", free, number(free)]])];
}

/** Of the head that learns: points of some minutes each, and when another one was swapped in. */
function head({ head: current, training, curve, swaps, clients, adapters }) {
  const name = (one) => (one == null ? "the head of the command line" : `head ${one}`);
  const newest = curve.at(-1)?.[1];
  return [big(number(newest, 2), `tokens per step with ${name(current)}${training ? "; another one is being trained" : ""}`),
    timeline(curve, swaps.map(([at, one]) => [at, name(one)]), "Acceptance length over the last hours"),
    sub(swaps.length ? `Swapped in: ${swaps.map(([at, one]) => `${name(one)} at ${time(at)}`).slice(-4).join(", ")}.` : "No head was swapped in yet."),
    ...(adapters.length ? [sub(`Adapters' own heads: ${adapters.map(([adapter, one, length]) => `${adapter} ${one == null ? "none learnt" : name(one)}${length ? `, ${number(length, 2)} tokens per step` : ""}`).join("; ")}.`)] : []),
    ...(Object.keys(clients).length ? [sub(`Since then by client: ${Object.entries(clients).map(([client, length]) => `${client} ${number(length, 2)}`).join(", ")}.`)] : [])];
}

const time = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

function stages(seen) {
  const first = seen[Math.max(seen.length - 11, 0)].totals, last = seen.at(-1).totals;
  const spent = (what) => Math.max(what(last) - what(first), 0);
  const tree = spent((all) => all.step_seconds.plain + all.step_seconds.speculative);
  const measured = ["draft", "verify", "commit"].map((name) => spent((all) => all.stage_seconds[name]));
  const sum = measured.reduce((a, b) => a + b, 0) || 1;
  const [draft, verify, commit] = measured.map((one) => (one / sum) * tree);
  const parts = [["s-draft", "draft", draft], ["s-verify", "verify", verify], ["s-commit", "sample and accept", commit],
    ["s-prefill", "prompts", spent((all) => all.step_seconds.prefill)], ["s-host", "scheduling between steps", spent((all) => all.host_seconds)]];
  const total = parts.reduce((all, [, , value]) => all + value, 0);
  if (!total) return [big("–", "nothing ran in the last 10 seconds"), ...shares([["s-free", "idle", 1, ""]])];
  const words = (value) => `${number((100 * value) / total)}%`;
  const steps = spent((all) => all.steps.plain + all.steps.speculative);
  return [big(steps ? number((tree / steps) * 1000, 1) : "–", "ms per step, the last 10 seconds"),
    ...shares(parts.map(([kind, name, value]) => [kind, name, value, words(value)]))];
}

function depths(drafters) {
  const shown = Object.entries(drafters).filter(([, one]) => one.drafts);
  if (!shown.length) return sub("Nothing has been drafted yet.");
  return shown.map(([name, one]) => {
    const deepest = one.accepted_at.findLastIndex((count) => count > 0);
    const deep = one.accepted_at.slice(0, Math.min(deepest + 1, 12)).map((count) => count / one.drafts);
    const colour = /NGRAM|SUFFIX|prediction/.test(name) ? "by-lookup" : "by-model";
    return h("div", { class: "drafter" },
      sub(`${name}: ${number(1 + one.accepted / one.drafts, 2)} tokens per draft, ${number((100 * one.accepted) / one.proposed)}% of ${number(one.proposed)} accepted`),
      columns(deep, colour));
  });
}

function cache({ queried_tokens: asked, hit_tokens: hit, prefilled_tokens: computed, retractions }) {
  return [big(asked ? `${number((100 * hit) / asked)}%` : "–", "of prompt tokens were cached"),
    ...shares([["s-used", "cached", hit, number(hit)], ["s-free", "looked up and computed", Math.max(asked - hit, 0), number(Math.max(asked - hit, 0))]]),
    sub(`${number(computed)} tokens prefilled, ${number(retractions)} requests preempted`)];
}

/** last: the newest choice there was anything to choose for. */
function policy(current, last) {
  if (!current) return sub("This server runs without speculation.");
  if (!current.options.length && !last) return sub("Nothing runs. Once something does, costs and choices are shown here.");
  const explain = last ?? current;
  const head = ["draft shape", "ms per step", "accepted drafts", "tokens/s"];
  const priced = explain.options.some((option) => option.price_ms != null);
  const rows = (priced ? explain.options : []).map((option) => h("tr", { "data-chosen": option.chosen },
    h("td", {}, option.option), h("td", { class: "n" }, number(option.price_ms, 2)),
    h("td", { class: "n" }, number(option.expected_accepted_drafts == null ? null : option.expected_accepted_drafts / Math.max(explain.requests, 1), 2)),
    h("td", { class: "n" }, number(option.expected_tokens_per_second))));
  const table = h("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Options" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { class: i ? "n" : "", scope: "col" }, name)))), h("tbody", {}, rows)));
  const when = current.options.length ? "At this load: " : "Nothing runs. The last choice: ";
  return [sub(`${when}${explain.summary}.`), priced ? table : sub("Costs are not compared: the server has one draft shape, or has no measured costs for this load.")];
}

function requests(list, texts) {
  if (!list.length) return sub("None.");
  const head = ["No.", "seconds", "prompt", "tokens", "tokens/s", "drafts", ...(texts ? ["prompt ends", "answer ends"] : [])];
  const rows = list.map((one) => {
    const running = one.first_token_seconds === null ? null : one.tokens / (one.seconds - one.first_token_seconds);
    const words = texts ? [one.prompt, one.text].map((text) => h("td", { class: "words", title: text }, text.slice(-90))) : [];
    return h("tr", {}, [one.number, number(one.seconds, 1), number(one.prompt_tokens), number(one.tokens), number(running),
      one.drafts ? "on" : "off"].map((value) => h("td", { class: "n" }, value)), words);
  });
  return h("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Requests" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { class: i < 6 ? "n" : "", scope: "col" }, name)))), h("tbody", {}, rows)));
}
