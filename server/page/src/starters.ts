// First messages of a new conversation, with the settings that show what the server can do.
import type { Capabilities, ChatSettings } from './types';

export interface Starter {
  label: string;
  text: string;
  settings?: Partial<ChatSettings>;
}

const SCHEMA = JSON.stringify(
  {
    type: 'object',
    properties: {
      city: { type: 'string', maxLength: 40 },
      country: { type: 'string', maxLength: 40 },
      inhabitants: { type: 'integer', minimum: 0, maximum: 100_000_000 },
    },
    required: ['city', 'country', 'inhabitants'],
    additionalProperties: false,
  },
  null,
  2,
);
const TOOLS = JSON.stringify(
  [
    {
      type: 'function',
      function: {
        name: 'get_weather',
        description: 'Get the weather in a city',
        parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
      },
    },
  ],
  null,
  2,
);

export function starters(model: Capabilities): Starter[] {
  const tool = { label: 'Call a tool', text: 'What is the weather in Paris?', settings: { tools: TOOLS } };
  return [
    { label: 'Tell a story', text: 'Tell me a short story about a lighthouse.' },
    { label: 'Answer in JSON', text: 'Describe the city of Paris.', settings: { schema: SCHEMA } },
    ...(model.tools ? [tool] : []),
  ];
}

// The settings for the next conversation: without what a starter added.
export function withoutStarter(settings: ChatSettings): ChatSettings {
  const { schema, tools } = settings;
  return { ...settings, schema: schema === SCHEMA ? '' : schema, tools: tools === TOOLS ? '' : tools };
}
