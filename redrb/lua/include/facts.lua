-- The settings of a task as scripts use them (`rules`), and the record of each stored group (`facts`).
--
-- The hash facts holds a record of every stored group, by member, packed with cmsgpack:
--   size, samples    bytes, and number of samples
--   status           status that the group was put with; left out: completed
--   score            a number by which the task's order sorts; left out: the group's position of
--                    arrival; '-arrival': its negative
--   priority         as given, if any
--   version, newest  oldest policy version, and version of the newest token, if known
--   tags             value of each declared tag that the group has, by name
--   first            its first id, if it was a dead letter and has another id now
--   current          the newest policy version when the group was put, if the task knew one
-- A put stores the record as its producer has packed it, and appends `current` packed by itself.
--@include task

local STATUSES = {'init', 'completed', 'aborted', 'expired', 'failed', 'filtered', 'archived'}

-- The pool in which groups of a status wait for a consumer group (include/pools.lua).
local function pool_of(group, status)
  return status == 'completed' and group or group .. ':' .. status
end

-- Settings of the task that decide about groups, the newest policy version that it knows, and its clock
-- as it is stored (include/clock.lua).
local known_rules
local function rules()
  if not known_rules then
    local stored = redis.call('HMGET', task, 'rules', 'version', 'clock')
    local readable, found = pcall(cmsgpack.unpack, stored[1] or '')
    known_rules = readable and type(found) == 'table' and found
      or {order = 'fifo', max_reads = 1, names = {}, limit = 0, max_bytes = 0}
    known_rules.exists = stored[1] ~= false
    known_rules.version, known_rules.clock = tonumber(stored[2] or ''), stored[3]
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
  for first = 1, #members, PAGE.arguments do
    local last = math.min(first + PAGE.arguments - 1, #members)
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

-- Whether a group is too stale by the task's rules.
local function is_overdue(facts)
  local rule = rules()
  local function is_over(version, staleness)
    return version and staleness and rule.version - version > staleness
  end
  return rule.version and facts.status ~= 'expired'
    and (is_over(facts.version, rule.max_staleness) or is_over(facts.newest, rule.max_token_staleness))
end

-- A group's score as a number.
local function score_of(facts, member)
  if facts.score == '-arrival' then
    return -tonumber(member)
  end
  return facts.score or tonumber(member)
end
