// Messages of a conversation that are sent: without failed turns, and without those that a full context dropped.
import type { Message } from './types';

// Of the context, after older messages were dropped: the rest is for the answer and the next turns.
const FILLED_SHARE = 0.6;
// Characters of text with about as many tokens as an image.
const IMAGE_CHARACTERS = 2000;

function turns(messages: Message[]): Message[][] {
  const found: Message[][] = [];
  for (const message of messages) {
    if (message.role === 'user' || !found.length) found.push([]);
    found.at(-1)!.push(message);
  }
  return found;
}

function hasFailed(turn: Message[]): boolean {
  const answer = turn.at(-1)!;
  return !!answer.failure && !answer.content && !answer.calls?.length;
}

export function promptMessages(messages: Message[]): Message[] {
  return turns(messages.filter((message) => !message.dropped))
    .filter((turn) => !hasFailed(turn))
    .flat();
}

// Whether a prompt has turns before its last one.
export function hasOlder(messages: Message[]): boolean {
  return turns(promptMessages(messages)).length > 1;
}

function size(turn: Message[]): number {
  const images = turn.reduce((count, message) => count + (message.images?.length ?? 0), 0);
  return JSON.stringify(turn.map(({ content, calls }) => ({ content, calls }))).length + images * IMAGE_CHARACTERS;
}

// The messages with older turns marked as dropped, so that the newest ones fit. `fitting` is the share of the prompt that
// the context holds. The last turn stays, and at least one other is dropped.
export function dropOlder(messages: Message[], fitting: number): Message[] {
  const sent = turns(promptMessages(messages));
  const sizes = sent.map(size);
  const most = sizes.reduce((sum, each) => sum + each, 0) * Math.min(fitting, 1) * FILLED_SHARE;
  let first = sent.length - 1;
  let total = sizes[first]!;
  while (first > 1 && total + sizes[first - 1]! <= most) total += sizes[--first]!;
  const kept = new Set(sent.slice(first).flat());
  return messages.map((message) => (kept.has(message) ? message : { ...message, dropped: true }));
}
