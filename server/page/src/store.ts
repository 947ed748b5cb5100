// Conversations in the browser's local storage, one entry each.
import { imageUrl, keepImage } from './image_store';
import type { ChatSettings, Conversation, Message, MessageImage } from './types';

const PREFIX = 'cellar.conversation.';
const FORMAT = 'cellar-conversations';
const IMAGE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;

export const DEFAULT_SETTINGS: ChatSettings = {
  model: '',
  system: '',
  temperature: '',
  top_p: '',
  top_k: '',
  min_p: '',
  repetition_penalty: '',
  max_tokens: '',
  seed: '',
  overflow: '',
  schema: '',
  tools: '',
};

export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, '0')).join('');
}

export function newConversation(settings: ChatSettings = DEFAULT_SETTINGS): Conversation {
  return {
    id: newId(),
    title: 'New conversation',
    named: false,
    updated: Date.now(),
    messages: [],
    settings: { ...settings },
  };
}

export function loadConversations(): Conversation[] {
  const found: Conversation[] = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(PREFIX)) continue;
    const conversation = valid(localStorage.getItem(key));
    if (conversation) found.push(conversation);
  }
  return found.sort((one, other) => other.updated - one.updated);
}

// False if the browser's storage is full.
export function remember(key: string, text: string): boolean {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

export function saveConversation(conversation: Conversation): boolean {
  return remember(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function deleteConversation(id: string): void {
  localStorage.removeItem(PREFIX + id);
}

export function titleOf(conversation: Conversation): string {
  if (conversation.named) return conversation.title;
  const question = conversation.messages.find((message) => message.role === 'user');
  const text = question?.content.trim() || question?.images?.[0]?.name || '';
  const first = text.slice(0, 200).trimEnd().replace(/\s+/g, ' ');
  return first ? (first.length > 60 ? `${first.slice(0, 59)}…` : first) : 'New conversation';
}

export function imagesOf(conversations: Conversation[]): MessageImage[] {
  return conversations.flatMap((conversation) => conversation.messages.flatMap((message) => message.images ?? []));
}

// With the images as data URLs.
export async function exported(conversations: Conversation[]): Promise<string> {
  const urls = new Map<string, string | null>();
  for (const { id } of imagesOf(conversations)) urls.set(id, await imageUrl(id));
  const listed = conversations.map((conversation) => ({
    ...conversation,
    messages: conversation.messages.map((message) => ({
      ...message,
      ...(message.images && { images: message.images.map((image) => ({ ...image, url: urls.get(image.id) })) }),
    })),
  }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations: listed }, null, 2);
}

// The conversations of an exported file, with new ids; an Error with the reason for any other file. Their images are kept.
export async function imported(text: string): Promise<Conversation[]> {
  let file: unknown;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error('The file is not JSON.');
  }
  const list = (file as { format?: unknown; conversations?: unknown } | null)?.conversations;
  if ((file as { format?: unknown } | null)?.format !== FORMAT || !Array.isArray(list)) {
    throw new Error('The file is not an export of this page.');
  }
  const conversations = list.map((entry, at) => {
    const conversation = checked(entry);
    if (!conversation) throw new Error(`Conversation ${at + 1} of the file is damaged.`);
    return { ...conversation, id: newId() };
  });
  for (const { messages } of conversations)
    for (const message of messages)
      if (message.images) message.images = await Promise.all(message.images.map(importedImage));
  return conversations;
}

interface ExportedImage extends MessageImage {
  url?: string;
}

async function importedImage({ url, ...image }: ExportedImage): Promise<MessageImage> {
  const id = newId();
  if (url) await keepImage(id, url);
  return { ...image, id };
}

function valid(text: string | null): Conversation | null {
  try {
    return checked(JSON.parse(text ?? 'null'));
  } catch {
    return null;
  }
}

function checked(entry: unknown): Conversation | null {
  const one = entry as Partial<Conversation> | null;
  if (!one || typeof one.id !== 'string' || typeof one.title !== 'string' || !Array.isArray(one.messages)) return null;
  if (!one.messages.every(isMessage)) return null;
  return {
    id: one.id,
    title: one.title,
    named: one.named === true,
    updated: typeof one.updated === 'number' ? one.updated : 0,
    messages: one.messages.map(checkedMessage),
    settings: checkedSettings(one.settings),
  };
}

function isMessage(entry: unknown): entry is Message {
  const one = entry as Partial<Message> | null;
  const roles: unknown[] = ['user', 'assistant', 'tool'];
  return !!one && typeof one.id === 'string' && typeof one.content === 'string' && roles.includes(one.role);
}

// The message without what this page does not know; a file may hold anything.
function checkedMessage(given: Message): Message {
  const message: Message = { id: given.id, role: given.role, content: given.content };
  if (Array.isArray(given.images)) message.images = given.images.flatMap(checkedImage);
  if (typeof given.reasoning === 'string') message.reasoning = given.reasoning;
  if (typeof given.reasoningSeconds === 'number') message.reasoningSeconds = given.reasoningSeconds;
  if (typeof given.callId === 'string') message.callId = given.callId;
  if (Array.isArray(given.calls)) {
    message.calls = given.calls.map((call) => ({
      id: String(call.id),
      name: String(call.name),
      arguments: String(call.arguments),
    }));
  }
  // An answer was streaming when the page was closed.
  if (given.state === 'cut') message.state = 'cut';
  else if (given.state) message.state = 'stopped';
  if (given.stats && Object.values(given.stats).every((value) => value === null || typeof value === 'number'))
    message.stats = given.stats;
  if (given.dropped === true) message.dropped = true;
  if (given.failure) {
    const { title, message: text, field, fitting } = given.failure;
    message.failure = { title: String(title), message: String(text), field: typeof field === 'string' ? field : null };
    if (typeof fitting === 'number') message.failure.fitting = fitting;
  }
  return message;
}

// None for what is no image. Those of an exported file have data URLs.
function checkedImage(given: Partial<ExportedImage> | null): ExportedImage[] {
  const { id, name, width, height, url } = given ?? {};
  if (typeof id !== 'string' || typeof name !== 'string') return [];
  const image = { id, name, width: Number(width) || 1, height: Number(height) || 1 };
  return [typeof url === 'string' && IMAGE_URL.test(url) ? { ...image, url } : image];
}

function checkedSettings(entry: unknown): ChatSettings {
  const given = (entry ?? {}) as Record<string, unknown>;
  const texts = Object.keys(DEFAULT_SETTINGS).map((name) => [name, typeof given[name] === 'string' ? given[name] : '']);
  return Object.fromEntries(texts) as unknown as ChatSettings;
}
