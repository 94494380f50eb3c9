-- Make a plain task ready to become an indexed one, a page at a time: the caller repeats.
-- KEYS[1] stream
-- Returns 1 where there is more, else 0
--@include task index room convert

begin_writing()
if not exists() or rules().indexed then
  return 0
end
return convert(groups()) and 1 or 0
