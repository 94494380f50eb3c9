-- Settings that a task remembers.
--
-- Work that a change of settings leaves is noted in the task, and done a page at a time (task/fill.lua):
--   filling     a place in the facts, from which on indexes of versions are filled
--   unsorted    "<first> <last>": groups of a random order with these ids may have their former place
--   shedding    there are more dead letters than a smaller max_dead allows
--@include task

local SETTINGS = {'format', 'order', 'limit', 'max_bytes', 'max_deliveries', 'sampled', 'max_staleness',
  'max_token_staleness', 'on_expired', 'max_reads', 'max_waiting', 'tags', 'groups_per_version',
  'max_dead', 'revision', 'incarnation', 'kind'}

-- Pack the settings that decide about groups into the field `rules`, which every script reads.
local function pack_rules()
  local stored = {}
  for _, name in ipairs(SETTINGS) do
    stored[name] = redis.call('HGET', task, name)
  end
  local tags = stored.tags
  local first, last = string.match(redis.call('HGET', task, 'unsorted') or '', '^(%d+) (%d+)$')
  redis.call('HSET', task, 'rules', cmsgpack.pack({
    revision = stored.revision,
    incarnation = stored.incarnation,
    order = stored.order or 'fifo',
    sampled = stored.sampled == '1',
    max_staleness = tonumber(stored.max_staleness or ''),
    max_token_staleness = tonumber(stored.max_token_staleness or ''),
    keep = stored.on_expired == 'keep',
    max_reads = tonumber(stored.max_reads or redis.call('HGET', task, 'default_max_reads') or '1'),
    names = tags and tags ~= '' and cjson.decode(tags) or {},
    limit = tonumber(stored.limit or '0'),
    max_waiting = tonumber(stored.max_waiting or '0'),
    max_bytes = tonumber(stored.max_bytes or '0'),
    groups_per_version = stored.max_staleness and tonumber(stored.groups_per_version or '') or nil,
    sorted = first and checked(first, task),
    unsorted = last and checked(last, task),
  }))
end

-- The reply of scripts that open a task or change it; `held` names the settings that the caller has given and
-- that keep another value.
local function all_settings(held)
  local settings, configured, stored = {}, {}, redis.call('HMGET', task, unpack(SETTINGS))
  for i, name in ipairs(SETTINGS) do
    settings[name] = stored[i] or ''
  end
  for name in string.gmatch(redis.call('HGET', task, 'configured') or '', '%S+') do
    configured[#configured + 1] = name
  end
  local work = redis.call('HMGET', task, 'filling', 'unsorted', 'shedding')
  return cmsgpack.pack({
    outcome = 'ok',
    settings = settings,
    epoch = redis.call('HGET', puts, 'epoch') or '0',
    generation = redis.call('HGET', task, 'generation') or '0',
    version = number(task, 'version'),
    configured = configured,
    held = held or {},
    removed = redis.call('GET', key('removed')) or '',
    unfinished = (work[1] or work[2] or work[3]) and true or false,
  })
end
