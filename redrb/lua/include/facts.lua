-- The rules of a task, and the facts of its groups.
--
-- The hash facts holds a record of every stored group, by member, packed with cmsgpack:
--   size, samples    bytes, and number of samples
--   status           status that the group was put with; left out: completed
--   score            a number by which the task's order sorts; left out: the group's position of
--                    arrival; '-arrival': its negative
--   priority         as given, if any
--   version, newest  oldest policy version, and version of the newest token, if known
--   reads            how often the group was read, if ever
--   tags             value of each declared tag that the group has, by name
--   current          the newest policy version when the group was put, if the task knew one
-- A put stores the record as its producer has packed it, and appends `current` packed by itself.
--@include task

local RULES = {'format', 'order', 'sampled', 'max_staleness', 'max_token_staleness', 'on_expired',
  'version', 'max_reads', 'default_max_reads', 'tags', 'keep_ms', 'keep_groups', 'limit', 'max_bytes',
  'capacity', 'revision'}

-- Settings of the task that decide about groups, and the newest policy version that it knows.
local known_rules
local function rules()
  if not known_rules then
    local stored = {}
    for i, value in ipairs(redis.call('HMGET', task, unpack(RULES))) do
      stored[RULES[i]] = value
    end
    known_rules = {
      exists = stored.format ~= false,
      revision = stored.revision,
      order = stored.order or 'fifo',
      sampled = stored.sampled == '1',
      max_staleness = tonumber(stored.max_staleness or ''),
      max_token_staleness = tonumber(stored.max_token_staleness or ''),
      keep = stored.on_expired == 'keep',
      version = tonumber(stored.version or ''),
      max_reads = tonumber(stored.max_reads or stored.default_max_reads or '1'),
      names = stored.tags and stored.tags ~= '' and cjson.decode(stored.tags) or {},
      keep_ms = tonumber(stored.keep_ms or ''),
      keep_groups = tonumber(stored.keep_groups or ''),
      limit = tonumber(stored.limit or '0'),
      max_bytes = tonumber(stored.max_bytes or '0'),
      capacity = tonumber(stored.capacity or '0'),
    }
  end
  return known_rules
end

local function unpack_facts(packed)
  local facts, current = cmsgpack.unpack(packed)
  facts.status = facts.status or 'completed'
  facts.current = facts.current or current
  return facts
end

local function facts_of(member)
  local packed = redis.call('HGET', key('facts'), member)
  return packed and unpack_facts(packed)
end

-- Facts of several members, false where there are none.
local function facts_of_all(members)
  local all = {}
  for first = 1, #members, 1000 do
    local last = math.min(first + 999, #members)
    for i, packed in ipairs(redis.call('HMGET', key('facts'), unpack(members, first, last))) do
      all[first + i - 1] = packed and unpack_facts(packed)
    end
  end
  return all
end

local function store_facts(member, facts)
  redis.call('HSET', key('facts'), member, cmsgpack.pack(facts))
end

-- Says that a group expired, and by which rules: '-' for a rule that the task has not.
local function expiry_note(version, max_staleness, max_token_staleness)
  return table.concat({version, max_staleness or '-', max_token_staleness or '-'}, ' ')
end

-- A group's score as a number.
local function score_of(facts, member)
  if facts.score == '-arrival' then
    return -tonumber(member)
  end
  return facts.score or tonumber(member)
end

-- Note in the facts that the group was read once more.
local function count_read(member, facts)
  facts.reads = (facts.reads or 0) + 1
  store_facts(member, facts)
end
