// The prefix cache as an icicle: a bar spans the tokens of a node, what is right of it continues them.
import type { EnginePrefix } from './types';

const WIDTH = 320;
const ROW = 18;
const MAX_ROWS = 16;

interface Placed {
  node: EnginePrefix;
  row: number;
  rows: number;
}

// Nodes without branches between them, used by the same slots, are drawn as one.
function merged(nodes: EnginePrefix[]): EnginePrefix[] {
  const kept = new Map<number, EnginePrefix>();
  const children = new Map<number | null, number>();
  for (const node of nodes) children.set(node.parent, (children.get(node.parent) ?? 0) + 1);
  const moved = new Map<number, number>();
  for (const node of nodes) {
    const parent = node.parent === null ? null : (moved.get(node.parent) ?? node.parent);
    const above = parent === null ? undefined : kept.get(parent);
    if (above && children.get(node.parent) === 1 && above.slots.join() === node.slots.join()) {
      kept.set(above.id, { ...above, length: above.length + node.length });
      moved.set(node.id, above.id);
    } else {
      kept.set(node.id, { ...node, parent });
    }
  }
  return [...kept.values()];
}

// Nodes with their rows: a leaf has one, a node above has those of its leaves. Most recently used branches come first.
function place(nodes: EnginePrefix[]): { placed: Placed[]; rows: number; hidden: number } {
  const children = new Map<number | null, EnginePrefix[]>();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const placed: Placed[] = [];
  let rows = 0;
  let hidden = 0;
  const visit = (node: EnginePrefix): number => {
    const entry: Placed = { node, row: rows, rows: 1 };
    if (rows >= MAX_ROWS) {
      hidden += 1;
      for (const child of children.get(node.id) ?? []) visit(child);
      return 0;
    }
    placed.push(entry);
    const below = children.get(node.id) ?? [];
    if (!below.length) rows += 1;
    const taken = below.map(visit).reduce((sum, each) => sum + each, 0);
    entry.rows = Math.max(taken, 1);
    return entry.rows;
  };
  for (const root of children.get(null) ?? []) visit(root);
  return { placed, rows, hidden };
}

export function PrefixTree({ nodes: all }: { nodes: EnginePrefix[] }) {
  if (!all.length) return <p class="hint">Empty.</p>;
  const nodes = merged(all);
  const { placed, rows, hidden } = place(nodes);
  const longest = Math.max(...placed.map(({ node }) => node.start + node.length), 1);
  const tokens = nodes.reduce((sum, node) => sum + node.length, 0);
  const shared = nodes.filter(
    (node) => nodes.filter((other) => other.parent === node.id).length > 1 || node.slots.length > 1,
  );
  const sharedTokens = shared.reduce((sum, node) => sum + node.length, 0);
  const summary = `${tokens.toLocaleString('en')} tokens in ${nodes.length} ${nodes.length === 1 ? 'node' : 'nodes'}, ${sharedTokens.toLocaleString('en')} of them shared`;
  // Square roots keep short prefixes visible beside long ones.
  const x = (position: number) => Math.sqrt(position / longest) * WIDTH;
  return (
    <figure class="tree">
      <svg viewBox={`0 0 ${WIDTH} ${Math.max(rows, 1) * ROW}`} role="img" aria-label={`Prefix cache: ${summary}`}>
        {placed.map(({ node, row, rows: height }) => {
          const left = x(node.start);
          const width = Math.max(x(node.start + node.length) - left - 1.5, 1);
          const used = node.slots.length;
          const title = `Tokens ${node.start} to ${node.start + node.length - 1}: ${node.length}${used ? `, used by slot ${node.slots.join(', ')}` : ', cached'}`;
          return (
            <g key={node.id} class={used > 1 ? 'node shared' : used ? 'node used' : 'node'}>
              <title>{title}</title>
              <rect x={left} y={row * ROW} width={width} height={height * ROW - 1.5} rx="2.5" />
              {width > 22 && (
                <text x={left + 5} y={row * ROW + (height * ROW) / 2}>
                  {node.length}
                  {used > 0 && width > 70 && ` · ${used > 3 ? `${used} slots` : `slot ${node.slots.join(', ')}`}`}
                </text>
              )}
            </g>
          );
        })}
      </svg>
      <figcaption class="hint">
        {summary}
        {hidden > 0 && `; ${hidden} older ones are not shown`}
      </figcaption>
    </figure>
  );
}
