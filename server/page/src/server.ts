// The state of the server: its models, or why it does not answer; asked again until the chosen model is ready and, where
// models are loaded and unloaded, after that as well.
import { useEffect, useState } from 'preact/hooks';
import { ApiFailure, readCapabilities, readModels } from './api';
import { usePolling } from './poll';
import type { Capabilities, ServedModel } from './types';

export interface Server {
  // The capabilities of the chosen model, if they are known.
  model: Capabilities | null;
  models: ServedModel[];
  // The entry that requests are for.
  chosen: ServedModel | null;
  // Whether models are loaded on demand: requests name theirs.
  several: boolean;
  // The phase of the chosen model while it is loaded.
  loading: string;
  state: 'connecting' | 'ready' | 'loading' | 'unreachable' | 'locked';
  text: string;
}

// `capabilities` are those of the model `id`.
interface Known {
  models: ServedModel[];
  id: string;
  capabilities: Capabilities | null;
}

// The model of a conversation, or the first one if it names none that is served.
function chosenOf(models: ServedModel[], name: string): ServedModel | null {
  return models.find((model) => model.id === name) ?? models[0] ?? null;
}

async function readServer(name: string, before: Known | null): Promise<Known> {
  const models = await readModels();
  const chosen = chosenOf(models, name);
  const id = chosen?.id ?? '';
  if (!chosen?.status) return { models, id, capabilities: await readCapabilities('') };
  if (chosen.status.value !== 'loaded') return { models, id, capabilities: null };
  const kept = before?.id === id ? before.capabilities : null;
  return { models, id, capabilities: kept ?? (await readCapabilities(id)) };
}

export function useServer(attempt: number, name: string, busy: boolean): Server {
  const [known, setKnown] = useState<Known | null>(null);
  const [failure, setFailure] = useState<ApiFailure | null>(null);
  const models = known?.models ?? [];
  const chosen = chosenOf(models, name);
  const several = !!chosen?.status;
  // Of one model they hold for all of its names.
  const capabilities = !several || known?.id === chosen?.id ? (known?.capabilities ?? null) : null;
  const read = async () => {
    try {
      const now = await readServer(name, known);
      setKnown(now);
      setFailure(null);
      return chosenOf(now.models, name);
    } catch (error) {
      setFailure(error instanceof ApiFailure ? error : new ApiFailure(0, String(error)));
      throw error;
    }
  };
  const polls = !known || failure !== null || several;
  usePolling(polls, several ? `${attempt} ${name} ${busy}` : attempt, async () => {
    const now = await read();
    return { value: true, busy: now?.status?.value === 'loading' };
  });
  // A failed answer may mean that the server is gone.
  useEffect(() => {
    if (attempt && !polls) read().catch(() => undefined);
  }, [attempt]);
  const base = { model: capabilities, models, chosen, several, loading: loadingPhase(chosen) };
  if (!failure) return { ...base, state: known ? 'ready' : 'connecting', text: readyText(capabilities) };
  if (failure.status === 401) return { ...base, state: 'locked', text: 'needs an API key' };
  if (failure.code === 'model_loading') return { ...base, state: 'loading', text: `loading: ${failure.phase}` };
  return { ...base, state: 'unreachable', text: failure.status ? failure.message : 'no connection' };
}

function readyText(model: Capabilities | null): string {
  return model ? `${model.id}, ${model.context.toLocaleString('en')} tokens` : 'connecting';
}

function loadingPhase(model: ServedModel | null): string {
  if (model?.status?.value !== 'loading') return '';
  return `Loading ${model.id}${model.status.progress ? `: ${model.status.progress}` : ''}`;
}

// Why the model gets no images; empty if it reads them.
export function whyNoImages({ chosen }: Server): string {
  if (!chosen) return 'The server does not answer yet.';
  if (!chosen.input_modalities) return `Whether ${chosen.id} reads images is known once it is loaded, by a first message.`;
  return chosen.input_modalities.includes('image') ? '' : `${chosen.id} does not read images.`;
}
