// The live view of the engine: slots, cells by group, the prefix cache and speculative decoding.
import type { ComponentChildren } from 'preact';
import { useEffect, useRef, useState } from 'preact/hooks';
import { format } from './message';
import { PrefixTree } from './prefixes';
import type { EngineCells, EngineFinished, EngineSequence, EngineSlot, EngineState } from './types';

const STATES = { free: 'free', other: 'other key', waiting: 'waits for prefix', prefill: 'prefill', decode: 'decode' };
const HISTORY = 60;
// More busy slots have one line each, without the list of their counts.
const DETAILED_SLOTS = 8;

const count = (value: number) => value.toLocaleString('en');
const percent = (part: number, whole: number) => (whole ? `${Math.round((100 * part) / whole)} %` : '–');

export function EngineView({ state, failed }: { state: EngineState | null; failed: boolean }) {
  const rates = useRates(state);
  if (!state)
    return <p class="hint">{failed ? 'The engine cannot be reached.' : 'Reading the state of the engine …'}</p>;
  const { counts } = state;
  // The server adds the counts of a sequence to its totals when the sequence ends.
  const running = (name: 'context_shifts' | 'cached_tokens' | 'prompt_tokens') =>
    state.slots.reduce((sum, { sequence }) => sum + (sequence?.[name] ?? 0), counts[name]);
  const cached = running('cached_tokens');
  const prompts = running('prompt_tokens');
  return (
    <div class={failed ? 'engine stale' : 'engine'}>
      {failed && <p class="hint bad">No answer: these are the last figures.</p>}
      <dl class="tiles">
        <Tile
          label="tokens / s"
          value={counts.running && rates.length ? format(rates.at(-1)!) : '–'}
          note={counts.running ? '' : 'idle'}
        >
          <Sparkline values={rates} />
        </Tile>
        <Tile
          label="slots"
          value={`${counts.running} / ${state.slots.length}`}
          note={counts.waiting ? `${counts.waiting} waiting` : 'none waiting'}
        />
        <Tile
          label="prompts cached"
          value={percent(cached, prompts)}
          note={`${count(cached)} of ${count(prompts)}`}
        />
        <Tile
          label="context shifts"
          value={count(running('context_shifts'))}
          note={`${count(counts.evicted_tokens)} tokens evicted`}
        />
      </dl>
      <Slots slots={state.slots} context={state.context} />
      <Section title="Cells" help="Keys and values of one token each, in a pool for each group of layers.">
        {state.cells.map((cells, at) => (
          <Cells key={at} cells={cells} />
        ))}
      </Section>
      <Section
        title="Prefix cache"
        help="Cached tokens of prompts and answers. What branches behind a bar shares its cells, without a copy."
      >
        <PrefixTree nodes={state.prefixes} />
      </Section>
      <Speculation drafters={state.drafters} />
      <Finished finished={state.finished} />
    </div>
  );
}

function Section({ title, help, children }: { title: string; help?: string; children: ComponentChildren }) {
  return (
    <section>
      <h3>{title}</h3>
      {help && <p class="hint">{help}</p>}
      {children}
    </section>
  );
}

function Tile({
  label,
  value,
  note,
  children,
}: {
  label: string;
  value: string;
  note?: string;
  children?: ComponentChildren;
}) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>
        <span class="figure">{value}</span>
        {note && <span class="hint">{note}</span>}
        {children}
      </dd>
    </div>
  );
}

function Sparkline({ values }: { values: number[] }) {
  const top = Math.max(...values, 1);
  const points = values.map(
    (value, at) => `${((at + HISTORY - values.length) / (HISTORY - 1)) * 100},${19 - (value / top) * 18}`,
  );
  return (
    <svg class="sparkline" viewBox="0 0 100 20" preserveAspectRatio="none" aria-hidden="true">
      <polyline points={points.join(' ')} />
    </svg>
  );
}

// Generated tokens per second between two states, of the last minute of states; finished and running sequences count.
function useRates(state: EngineState | null): number[] {
  const [rates, setRates] = useState<number[]>([]);
  const before = useRef<{ tokens: number; at: number } | null>(null);
  useEffect(() => {
    if (!state) return;
    const now = { tokens: state.counts.generated_tokens, at: performance.now() };
    const last = before.current;
    before.current = now;
    if (!last || now.tokens < last.tokens) return;
    const rate = ((now.tokens - last.tokens) / Math.max(now.at - last.at, 1)) * 1000;
    setRates((all) => [...all.slice(1 - HISTORY), rate]);
  }, [state]);
  return rates;
}

// The parts of a sequence's tokens, in their order.
function parts(sequence: EngineSequence) {
  const { prompt_tokens, cached_tokens, context_tokens, dropped_tokens } = sequence;
  const computed = Math.max(Math.min(context_tokens + dropped_tokens, prompt_tokens) - cached_tokens, 0);
  const answer = Math.max(context_tokens + dropped_tokens - prompt_tokens, 0);
  return { cached: cached_tokens, computed, answer: Math.max(answer - dropped_tokens, 0), dropped: dropped_tokens };
}

function Slots({ slots, context }: { slots: EngineSlot[]; context: number }) {
  const busy = slots.filter((slot) => slot.state !== 'free');
  const free = slots.filter((slot) => slot.state === 'free');
  const longest = Math.max(...slots.map((slot) => (slot.sequence ? slot.sequence.context_tokens : 0)), 64);
  const dense = busy.length > DETAILED_SLOTS;
  const scale = Math.min(2 ** Math.ceil(Math.log2(longest)), context);
  return (
    <Section title="Slots" help={`Bars show up to ${count(scale)} of ${count(context)} tokens.`}>
      <ol class={dense ? 'slots dense' : 'slots'} start={0}>
        {busy.map((slot) => (
          <Slot key={slot.slot} slot={slot} scale={scale} dense={dense} />
        ))}
        {free.length > 0 && (
          <li class="slot free">
            <span class="number" />
            <span class="bar" />
            <span class="state">{`${free.length} free`}</span>
          </li>
        )}
      </ol>
      <Legend
        entries={[
          ['cached', 'from the cache'],
          ['computed', 'prompt computed'],
          ['answer', 'generated'],
        ]}
      />
    </Section>
  );
}

function Slot({ slot, scale, dense }: { slot: EngineSlot; scale: number; dense: boolean }) {
  const { sequence } = slot;
  const shown = sequence ? parts(sequence) : null;
  return (
    <li class={`slot ${slot.state}`}>
      <span class="number">{slot.slot}</span>
      <Bar
        total={scale}
        pieces={
          shown
            ? [
                ['cached', shown.cached],
                ['computed', shown.computed],
                ['answer', shown.answer],
              ]
            : []
        }
        label={sequence ? slotLabel(slot, sequence, dense) : STATES[slot.state]}
      />
      {!dense && <span class="state">{STATES[slot.state]}</span>}
      {sequence && !dense && <Chips sequence={sequence} />}
    </li>
  );
}

function slotLabel({ state }: EngineSlot, sequence: EngineSequence, dense: boolean): string {
  if (!dense) return `${sequence.context_tokens} tokens, ${sequence.cached_tokens} from the cache`;
  return `${STATES[state]}: ${chips(sequence)
    .map(([, text]) => text)
    .join(', ')}`;
}

// The counts of a sequence, with their colours.
function chips(sequence: EngineSequence): [kind: string, text: string][] {
  const { cached_tokens, drafted_tokens, context_shifts } = sequence;
  const all: [string, string, boolean][] = [
    ['', `${count(sequence.prompt_tokens)} prompt`, true],
    ['cached', `${count(cached_tokens)} shared`, cached_tokens > 0],
    ['', `${count(sequence.generated_tokens)} generated`, true],
    ['accepted', `${count(sequence.accepted_tokens)}/${count(drafted_tokens)} drafts`, drafted_tokens > 0],
    [
      'shifted',
      `${context_shifts} ${context_shifts === 1 ? 'shift' : 'shifts'}, ${count(sequence.dropped_tokens)} dropped`,
      context_shifts > 0,
    ],
  ];
  return all.filter(([, , shown]) => shown).map(([kind, text]) => [kind, text]);
}

function Chips({ sequence }: { sequence: EngineSequence }) {
  return (
    <ul class="chips">
      {chips(sequence).map(([kind, text]) => (
        <li key={text} class={kind || undefined}>
          {text}
        </li>
      ))}
    </ul>
  );
}

type Piece = [kind: string, size: number];

function Bar({ pieces, total, label }: { pieces: Piece[]; total: number; label: string }) {
  return (
    <span class="bar" role="img" aria-label={label} title={label}>
      {pieces.map(
        ([kind, size]) =>
          size > 0 && <span key={kind} class={kind} style={{ width: `${Math.min((100 * size) / total, 100)}%` }} />,
      )}
    </span>
  );
}

function Legend({ entries }: { entries: [string, string][] }) {
  return (
    <ul class="legend" aria-hidden="true">
      {entries.map(([kind, text]) => (
        <li key={kind}>
          <i class={kind} />
          {text}
        </li>
      ))}
    </ul>
  );
}

function Cells({ cells }: { cells: EngineCells }) {
  const name =
    cells.range === 'full'
      ? 'Full attention'
      : `${cells.range === 'window' ? 'Window' : 'Chunk'} of ${count(cells.range_size ?? 0)}`;
  const own = cells.used - cells.shared;
  const free = cells.total - cells.used - cells.cached;
  const text = [
    `${count(cells.used)} in use`,
    ...(cells.shared ? [`${count(cells.shared)} of them shared`] : []),
    `${count(cells.cached)} cached`,
    `${count(free)} free`,
  ].join(' · ');
  return (
    <div class="cells">
      <p>
        {name}{' '}
        <span class="hint">
          {cells.layers} layers, {count(cells.total)} cells
        </span>
      </p>
      <Bar
        total={cells.total}
        pieces={[
          ['shared', cells.shared],
          ['used', own],
          ['cached', cells.cached],
        ]}
        label={text}
      />
      <p class="hint">{text}</p>
    </div>
  );
}

function Speculation({ drafters }: { drafters: EngineState['drafters'] }) {
  const used = drafters.filter((drafter) => drafter.drafted_tokens);
  return (
    <Section title="Speculation" help="Draft tokens that the model accepted cost no step of their own.">
      {used.length === 0 && <p class="hint">{drafters.length ? 'No drafts yet.' : 'No drafter.'}</p>}
      {used.map(({ kind, drafted_tokens, accepted_tokens }) => (
        <div class="drafter" key={kind}>
          <span>{kind}</span>
          <Bar
            total={drafted_tokens}
            pieces={[['accepted', accepted_tokens]]}
            label={`${accepted_tokens} of ${drafted_tokens} accepted`}
          />
          <span class="hint">
            {`${count(accepted_tokens)} of ${count(drafted_tokens)} accepted, ${percent(accepted_tokens, drafted_tokens)}`}
          </span>
        </div>
      ))}
    </Section>
  );
}

function Finished({ finished }: { finished: EngineFinished[] }) {
  return (
    <Section title="Finished">
      {finished.length === 0 && <p class="hint">No answer yet.</p>}
      <ol class="finished">
        {finished.slice(0, 8).map(({ number, slot, age_seconds, sequence }) => (
          <li key={number}>
            <span class="hint">
              {age(age_seconds)}
              {slot !== null && `, slot ${slot}`}
            </span>
            <Chips sequence={sequence} />
          </li>
        ))}
      </ol>
    </Section>
  );
}

function age(seconds: number): string {
  if (seconds < 2) return 'now';
  return seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}
