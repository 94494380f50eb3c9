-- Settings that a task remembers.
--@include task

-- In the order in which task/open.lua returns them.
local SETTINGS = {'format', 'order', 'limit', 'max_bytes', 'max_deliveries', 'sampled', 'max_staleness',
  'max_token_staleness', 'on_expired', 'max_reads', 'capacity', 'eviction', 'rate', 'tags', 'keep_ms',
  'keep_groups', 'partitions', 'groups_per_version', 'max_dead', 'revision', 'incarnation', 'kind'}

-- Pack the settings that decide about groups into the field `rules`, which every script reads.
local function pack_rules()
  local stored = {}
  for _, name in ipairs(SETTINGS) do
    stored[name] = redis.call('HGET', task, name)
  end
  local tags = stored.tags
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
    keep_ms = tonumber(stored.keep_ms or ''),
    keep_groups = tonumber(stored.keep_groups or ''),
    keeps = (stored.keep_ms or stored.keep_groups) ~= false,
    partitions = stored.partitions ~= false,
    limit = tonumber(stored.limit or '0'),
    max_bytes = tonumber(stored.max_bytes or '0'),
    capacity = tonumber(stored.capacity or '0'),
    groups_per_version = tonumber(stored.groups_per_version or ''),
    rate = stored.rate ~= false and stored.rate ~= '',
  }))
end

-- The fields of the task that a copy of it has, too: a flat list name, value, ...
local function task_fields()
  local found, stored = {}, redis.call('HGETALL', task)
  for i = 1, #stored, 2 do
    if stored[i] ~= 'rules' and stored[i] ~= 'clock' then
      found[#found + 1], found[#found + 2] = stored[i], stored[i + 1]
    end
  end
  return found
end
