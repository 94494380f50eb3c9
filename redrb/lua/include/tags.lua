-- Declared tags of indexed tasks: tag:<pool>:<name> sorts what waits in a pool by one tag.
--
-- Numbers are their own score. Strings are numbered from 1 in the hash terms, by "<name>\n<string>",
-- and the n-th has the score n * 1e300: every number is nearer to zero (checked by the client), so
-- no range of numbers holds a string. There is room for 179 million strings.
--@include task

-- The score of a string, as text; nil when it is unknown and not to be created.
local function term(name, text, create)
  local terms, field = key('terms'), name .. '\n' .. text
  local found = redis.call('HGET', terms, field)
  if not found and create then
    found = redis.call('HLEN', terms) + 1
    redis.call('HSET', terms, field, found)
  end
  return found and found .. 'e300' or nil
end

-- The shortest of the usual texts that means exactly this number.
local function text_of(value)
  local text = string.format('%.15g', value)
  return tonumber(text) == value and text or string.format('%.17g', value)
end

-- Scores of a group's tag values, as text and in the order of `names`; '-' where there is none.
local function intern(names, values, create)
  local scores = {}
  for i, name in ipairs(names) do
    local value = values[i]
    if type(value) == 'string' then
      scores[i] = term(name, value, create) or '-'
    else
      scores[i] = type(value) == 'number' and text_of(value) or '-'
    end
  end
  return scores
end

local function tag_in(pool, names, member, scores)
  for i, name in ipairs(names) do
    if scores[i] and scores[i] ~= '-' then
      redis.call('ZADD', key('tag', pool .. ':' .. name), scores[i], member)
    end
  end
end

local function tag_out(pool, names, members)
  for _, name in ipairs(names) do
    for first = 1, #members, 1000 do
      local last = math.min(first + 999, #members)
      redis.call('ZREM', key('tag', pool .. ':' .. name), unpack(members, first, last))
    end
  end
end
