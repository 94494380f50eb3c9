-- The rules of a task, and the facts of the groups of an indexed task.
--
-- The hash facts holds a record of every stored group, by member, packed with cmsgpack:
--   size, samples    bytes, and number of samples
--   status           status that the group was put with
--   score            a number, by which the task's order sorts
--   priority         as given, if any
--   version, newest  oldest policy version, and version of the newest token, if known
--   reads            how often the group was read, if ever
--   tags             score of each declared tag that the group has, by name
--   current          the newest policy version when the group was put, if the task knew one
--@include task

local RULES = {'indexed', 'order', 'sampled', 'max_staleness', 'max_token_staleness', 'on_expired',
  'version', 'max_reads', 'default_max_reads', 'tags', 'keep_ms', 'keep_groups', 'converting'}

-- Settings of the task that decide about groups, and the newest policy version that it knows.
local known_rules
local function rules()
  if not known_rules then
    local stored = {}
    for i, value in ipairs(redis.call('HMGET', task, unpack(RULES))) do
      stored[RULES[i]] = value
    end
    known_rules = {
      indexed = stored.indexed == '1',
      order = stored.order or 'fifo',
      sampled = stored.sampled == '1',
      max_staleness = tonumber(stored.max_staleness or ''),
      max_token_staleness = tonumber(stored.max_token_staleness or ''),
      keep = stored.on_expired == 'keep',
      version = tonumber(stored.version or ''),
      max_reads = tonumber(stored.max_reads or stored.default_max_reads),
      names = stored.tags and stored.tags ~= '' and cjson.decode(stored.tags) or {},
      keep_ms = tonumber(stored.keep_ms or ''),
      keep_groups = tonumber(stored.keep_groups or ''),
      described = stored.indexed == '1' or stored.converting == '1', -- there are facts
    }
  end
  return known_rules
end

local function facts_of(member)
  local packed = redis.call('HGET', key('facts'), member)
  return packed and cmsgpack.unpack(packed)
end

-- Facts of several members, false where there are none.
local function facts_of_all(members)
  local all = {}
  for first = 1, #members, 1000 do
    local last = math.min(first + 999, #members)
    for i, packed in ipairs(redis.call('HMGET', key('facts'), unpack(members, first, last))) do
      all[first + i - 1] = packed and cmsgpack.unpack(packed)
    end
  end
  return all
end

local function store_facts(member, facts)
  redis.call('HSET', key('facts'), member, cmsgpack.pack(facts))
end

-- Note in the facts that the group was read once more.
local function count_read(member, facts)
  facts.reads = (facts.reads or 0) + 1
  store_facts(member, facts)
end
