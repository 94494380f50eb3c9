-- Indexed tasks: the facts of each group, and the pools in which it waits.
--
-- facts holds, by member, "<size> <status> <score> <priority> <version> <newest> <reads> <samples> <tags ...>"
-- of every stored group, '-' where there is none; last comes " v<version>", the current one when it
-- was put, where the task knew one. A pool is what waits for one consumer group in one
-- status: ready:<pool> sorts it by the task's order, versions:<pool> and newest:<pool> by policy
-- version for expiry, tag:<pool>:<name> by a tag. What is leased is in no pool.
--
-- In a sampled order the score is a weight, and a group's place is clock + Exp(1) / weight, where
-- clock is the place of what was taken last: exponentials have no memory, so the lowest place is at
-- any time a draw with probability weight / sum of weights (Efraimidis and Spirakis 2006).
--@include task tags

local STATUS, SCORE, PRIORITY, VERSION, NEWEST, READS, TAGS = 2, 3, 4, 5, 6, 7, 9
local STATUSES = {'init', 'completed', 'aborted', 'expired', 'failed', 'filtered', 'archived'}

local known_rules
local function rules()
  if not known_rules then
    local told = redis.call('HMGET', task, 'indexed', 'order', 'sampled', 'max_staleness',
      'max_token_staleness', 'on_expired', 'version', 'max_reads', 'tags', 'keep_ms', 'keep_groups',
      'converting')
    known_rules = {
      indexed = told[1] == '1',
      order = told[2] or 'fifo',
      sampled = told[3] == '1',
      max_staleness = tonumber(told[4] or ''),
      max_token_staleness = tonumber(told[5] or ''),
      keep = told[6] == 'keep',
      version = tonumber(told[7] or ''),
      max_reads = tonumber(told[8] or '1'),
      names = told[9] and told[9] ~= '' and cjson.decode(told[9]) or {},
      keep_ms = tonumber(told[10] or ''),
      keep_groups = tonumber(told[11] or ''),
      described = told[1] == '1' or told[12] == '1', -- there are facts
    }
  end
  return known_rules
end

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do
    found[#found + 1] = word
  end
  return found
end

local function facts_of(member)
  local text = redis.call('HGET', key('facts'), member)
  return text and words(text)
end

local function pool_of(group, status)
  return status == 'completed' and group or group .. ':' .. status
end

-- The pool to which a group belongs while it waits: of its status, unless it was moved.
local function home_of(group, member, facts)
  return pool_of(group, redis.call('HGET', key('moved', group), member) or facts[STATUS])
end

-- Call a command with many arguments, a thousand at a time. Returns the sum of the replies.
local function in_parts(command, name, arguments)
  local total = 0
  for first = 1, #arguments, 1000 do
    local last = math.min(first + 999, #arguments)
    total = total + redis.call(command, name, unpack(arguments, first, last))
  end
  return total
end

local function versions_of(pool)
  return key(rules().order == 'stalest' and 'ready' or 'versions', pool)
end

local seeded = false
local function exponential()
  if not seeded then
    local time = redis.call('TIME')
    math.randomseed((time[1] * 1000003 + time[2]) % 2147483647)
    seeded = true
  end
  return -math.log(1 - math.random())
end

local function weigh(group, pool, members, sign)
  local total = 0
  for first = 1, #members, 1000 do
    local last = math.min(first + 999, #members)
    local found = redis.call('HMGET', key('facts'), unpack(members, first, last))
    for _, text in ipairs(found) do
      total = total + (text and tonumber(words(text)[SCORE]) or 0)
    end
  end
  if total > 0 then
    redis.call('HINCRBYFLOAT', key('mass', group), pool, string.format('%.17g', sign * total))
  end
end

local function place(facts, clock)
  if not clock then
    return facts[SCORE]
  end
  local weight = tonumber(facts[SCORE])
  return weight > 0 and string.format('%.17g', clock + exponential() / weight) or 'inf'
end

local function clock_of(group, pool)
  return rules().sampled and tonumber(redis.call('HGET', key('clock', group), pool) or '0')
end

-- Groups begin to wait in a pool; `all` holds the facts of each, which are stored already.
local function enter(group, pool, members, all)
  local told, clock = rules(), clock_of(group, pool)
  local ready, versions, newest = {}, {}, {}
  for i, member in ipairs(members) do
    local facts = all[i]
    ready[#ready + 1], ready[#ready + 2] = place(facts, clock), member
    if told.max_staleness and told.order ~= 'stalest' and facts[VERSION] ~= '-' then
      versions[#versions + 1], versions[#versions + 2] = facts[VERSION], member
    end
    if told.max_token_staleness and facts[NEWEST] ~= '-' then
      newest[#newest + 1], newest[#newest + 2] = facts[NEWEST], member
    end
    if #told.names > 0 then
      tag_in(pool, told.names, member, {unpack(facts, TAGS)})
    end
  end
  in_parts('ZADD', key('ready', pool), ready)
  in_parts('ZADD', key('versions', pool), versions)
  in_parts('ZADD', key('newest', pool), newest)
  if told.sampled then
    weigh(group, pool, members, 1)
  end
end

-- Groups wait no longer in a pool. `lowest_of`: a sorted set of which they are the lowest, where the
-- caller knows one; they leave it by rank, which is cheaper.
local function withdraw(group, pool, members, lowest_of)
  local told = rules()
  local function remove(kind)
    local name = key(kind, pool)
    if name == lowest_of then
      redis.call('ZREMRANGEBYRANK', name, 0, #members - 1)
    else
      in_parts('ZREM', name, members)
    end
  end
  remove('ready')
  if told.max_staleness and told.order ~= 'stalest' then
    remove('versions')
  end
  if told.max_token_staleness then
    remove('newest')
  end
  if #told.names > 0 then
    tag_out(pool, told.names, members)
  end
  if told.sampled then
    weigh(group, pool, members, -1)
    if redis.call('EXISTS', key('ready', pool)) == 0 then -- floating sums drift: begin anew
      redis.call('HDEL', key('mass', group), pool)
      redis.call('HDEL', key('clock', group), pool)
    end
  end
end
